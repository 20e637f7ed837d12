"""Raters: who gives feedback, how far they are trusted, and which samples are quarantined because of them."""
