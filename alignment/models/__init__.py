"""The policy model: a base model, the adapters on it, and how both are sharded over ranks."""
