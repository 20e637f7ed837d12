"""Judging: the rooms behind workers/judge.py."""
