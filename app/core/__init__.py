"""What every part of the API is built on: settings, database, jobs, errors, HTTP, leases and limits."""
