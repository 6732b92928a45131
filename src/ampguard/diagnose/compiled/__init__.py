"""Failures of compiled code and of kernels: what differs from eager."""
