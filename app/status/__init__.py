"""The whole ring at a glance."""
