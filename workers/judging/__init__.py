"""Rewards for finished turns from rules, next messages, HTTP services, LLM judges and reward models.

Each turn and source has a judgement: a row under a lease, answered off the request path.
"""
