"""Where a failure begins: back along the chain of bad values."""
