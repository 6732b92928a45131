"""Which results are bad, and whose business that is: losses, outputs in evaluation, buffers, gradients."""
