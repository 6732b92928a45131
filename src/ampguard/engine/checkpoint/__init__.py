"""Save and resume: what a run's state is, what is refused, and the file."""
