"""Reward models of a policy: which one serves, how it stands with people, and who said so."""
