"""Compiled functions and compiled training steps."""
