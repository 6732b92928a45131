"""The AMP engine: precision modes, the optimizer step, and what happens when numbers break."""
