"""Judging: the rooms behind workers/judging/judge.py."""
