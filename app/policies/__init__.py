"""Policies, their versions and the pointer to the one that serves."""
