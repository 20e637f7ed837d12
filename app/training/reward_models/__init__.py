"""Reward models of a policy: their fits, which one serves, and how well it agrees with people."""
