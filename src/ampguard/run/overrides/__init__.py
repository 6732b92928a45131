"""The precision of an unmodified script, changed from outside: what is asked for, and the patches that make it true.

They are installed over the guard's probes, so that the guard records the autocast state and the loss that really run.
"""
