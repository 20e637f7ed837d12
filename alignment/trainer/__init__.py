"""The learner and its parts: batches in, versions out."""
