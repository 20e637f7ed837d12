"""The reward model: a head on the trunk that has learned what people say, and how far it is to be believed.

`words` is what it is fitted on, and free of torch; `model` fits, scores and keeps it.
"""
