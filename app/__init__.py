"""The HTTP API, the database and the command line. Never imports torch."""
