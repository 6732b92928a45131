"""The flight recorder: keeps just enough of the running step to run it again."""
