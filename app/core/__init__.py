"""The base of every other package: settings, database, jobs, errors, HTTP, cache, leases and rate limits."""
