"""Audit: who moved what, when and why, read back."""
