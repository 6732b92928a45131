"""The AMP protocol as one state machine: scale, backward, (unscale, clip,) step, update. Imports no torch."""
