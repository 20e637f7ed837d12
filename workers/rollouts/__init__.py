"""Rollouts: replies that are sampled for training and shadow deployments, off the request path."""
