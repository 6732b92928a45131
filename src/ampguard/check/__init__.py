"""What this machine's devices can do in each precision, found by computing, never by version."""
