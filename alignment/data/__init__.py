"""From samples to tensors: collation, prefix sharing and micro-batches."""
