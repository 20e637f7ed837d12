"""Judgements: reward sources that are asked about finished turns, off the request path."""
