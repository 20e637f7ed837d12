"""Feedback about turns and conversations: committed before it is acknowledged, recorded once for each key."""
