"""Planned runs of environments: create or join one, claim its attempts, and see how far it is."""
