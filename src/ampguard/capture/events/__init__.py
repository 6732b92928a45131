"""What is kept of the running step, how it gets there, and when it is dropped."""
