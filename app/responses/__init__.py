"""/v1/responses, stateless: another wire to the same chat, for clients that speak it by default."""
