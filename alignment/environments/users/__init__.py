"""Simulated users of dialogues: scripts, and models at a fixed version."""
