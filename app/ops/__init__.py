"""Health, status, metrics, the audit log, and adapter files for engines."""
