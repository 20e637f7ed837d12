"""SGLang as an engine: its routes, the fields of its requests and replies, and its errors."""
