"""What feeds the protocol's state machine: which optimizer's gradients a call changed, and by which scale."""
