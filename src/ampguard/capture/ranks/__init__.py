"""What ranks should have in common, and how to tell cheaply whether they have."""
