"""Recorded turns as people look at them: one turn with all that became of it, and lists with filters."""
