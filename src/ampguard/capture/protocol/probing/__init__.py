"""What the protocol is told of each call of a training loop: one file per kind of call, wrapped while the guard is on."""
