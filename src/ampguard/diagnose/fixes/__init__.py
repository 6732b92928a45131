"""Fixes: proposed, written as the script's own code, and tried on the failing step."""
