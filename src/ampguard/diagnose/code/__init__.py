"""What the text of a script says: its statements and expressions, read and rewritten; nothing is run."""
