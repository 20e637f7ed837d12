"""vLLM as an engine: its routes, those that Attune's plug-in adds to it, its fields and its errors."""
