"""The life cycle of leased jobs: claims, heartbeats, retries, and user code under a time limit."""
