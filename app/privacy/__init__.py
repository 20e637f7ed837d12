"""Subjects: the people behind turns and feedback; what is on record of one, and its erasure."""
