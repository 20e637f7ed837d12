"""Projects and their keys."""
