"""Which version answers whom: routing, releases, canaries, shadow deployments and pins."""
