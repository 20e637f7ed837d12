"""The demo's simulated users and its model in one process, to measure algorithms without the service."""
