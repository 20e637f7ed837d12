"""The trunk: a frozen base model, the adapter on it, and the way it is cut over ranks."""
