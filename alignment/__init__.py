"""The learning library: tensors and formulas. It knows no web framework, no database and no queue."""
