"""Statistics of a release: canary, shadow deployment and gates. Torch-free."""
