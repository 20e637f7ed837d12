"""/v1/responses: another wire to the same chat, for clients that speak it by default."""
