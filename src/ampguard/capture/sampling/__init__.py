"""Vital signs, and what is looked at now and then under an allowance."""
