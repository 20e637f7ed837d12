"""Data subjects: what is stored of a person, its export and its erasure, and which versions learned from it."""
