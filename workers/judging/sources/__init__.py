"""The reward sources that are asked: rules, next turns, LLM judges, HTTP services and reward models."""
