"""Feedback: what people say about a turn, durable before it is acknowledged, counted once."""
