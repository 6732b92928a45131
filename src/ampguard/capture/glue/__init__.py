"""What runs outside every module: taped operator by operator, or call by call."""
