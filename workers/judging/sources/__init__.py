"""Reward sources that a judgement is asked of: language models, HTTP services, rules and reward models."""
