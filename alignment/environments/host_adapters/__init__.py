"""What host.py runs in other interpreters: a file for each package. They are loaded by path, and not imported."""
