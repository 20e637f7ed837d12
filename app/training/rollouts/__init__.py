"""Rollouts: what the learner asks for itself, shown and steered. workers.rollouts does the asking."""
