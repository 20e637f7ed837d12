"""Metrics: what this process counts, what updates measured, and the page where Prometheus reads both."""
