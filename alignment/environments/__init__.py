"""Environments of agents: tools, the sandbox that runs code, and grading. Torch-free."""
