"""The registry of policies and their versions."""
