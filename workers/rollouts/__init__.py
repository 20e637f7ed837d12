"""Rollouts: which replies the learner asks for, when an engine has room for them, and what becomes of them."""
