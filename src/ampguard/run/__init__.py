"""Run a stranger's script under guard, exactly as Python would run it."""
