"""/v1/messages: Anthropic's wire to the same chat, for its SDKs and for agents that speak it."""
