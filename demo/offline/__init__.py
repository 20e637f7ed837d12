"""The demo's shoppers and its model in one process: what an algorithm teaches, without the service around it."""
