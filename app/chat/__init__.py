"""Chat completions on the OpenAI wire, every turn recorded in tokens."""
