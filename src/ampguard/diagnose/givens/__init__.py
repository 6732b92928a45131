"""What a step was given, and where that came from."""
