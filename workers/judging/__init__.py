"""The judge stage asks every reward source but feedback: rules, next messages, HTTP services and LLM judges.

Each turn and source has a judgement: a row under a lease, answered off the request path. The trainer answers those of
the reward model.
"""
