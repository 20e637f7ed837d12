"""The command line: `attune --help`."""
