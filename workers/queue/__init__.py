"""Leased jobs: their life cycle from the claim to the result, and user code under a time limit."""
