"""Version directories: the manifest, and what adapters and full weights must contain to be loaded by an engine."""
