"""Signals about a reply: rules, verifiers, judge prompts, next-turn evidence, rater trust. Torch-free."""
