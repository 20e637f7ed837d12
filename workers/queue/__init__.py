"""What all leased jobs share: heartbeats, retries, and running user code."""
