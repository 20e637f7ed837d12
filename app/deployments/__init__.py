"""Which version answers which request: deployments, routing, canaries, shadow deployments and pins."""
