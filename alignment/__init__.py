"""The workshop: tensors and formulas; no web, no database, no queue."""
