"""Who gives feedback, how far they are believed, and what of theirs waits for an admin."""
