"""Signals about a reply: rules, verifiers, judge prompts, next-turn evidence and rater trust. Torch-free."""
