"""What is kept of a call of a module beside its arguments."""
