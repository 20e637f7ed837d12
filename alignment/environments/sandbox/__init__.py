"""Sandboxes: run Python that a model wrote, so that it reaches nothing of the host."""
