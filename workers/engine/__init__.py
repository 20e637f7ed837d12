"""One engine: start it, load the wanted versions before it takes traffic, monitor and restart it."""
