"""The console: server-rendered pages at /console, for the people who operate a policy and who annotate its replies."""
