"""Tools that agents call in rollouts."""
