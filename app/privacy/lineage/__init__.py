"""Lineage: which feedback taught which version, and back."""
