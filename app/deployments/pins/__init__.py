"""Pins: conversations, users and keys that are held on one version, whatever the pointer does."""
