"""The engines of a deployment: which are ready, which versions each has loaded, and which it should have."""
