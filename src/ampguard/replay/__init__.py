"""Runs a recorded step again, traced operator by operator, as it was or under a changed precision."""
