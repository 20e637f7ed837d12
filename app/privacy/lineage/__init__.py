"""Lineage: which feedback a version learned from, and which versions learned from a feedback or a completion."""
