"""Reports: stored, merged and shown. Made from incidents and nothing else; no torch in this room."""
