"""The demo: a bicycle shop's support chat that learns from simulated users."""
