"""From a trained version to a live one: verify, evaluate, shadow, canary, publish, and sync to engines."""
