"""The trainer: updates a policy from batches, and reads and writes its versions."""
