"""Drop-ins for the frameworks people train with: one file each, imported only when asked for."""
