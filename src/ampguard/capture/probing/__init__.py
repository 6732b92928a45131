"""What the recorder is told of PyTorch's functions: one file per kind of call, wrapped while the guard is on."""
