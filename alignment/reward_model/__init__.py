"""The reward model: a head on the base model that learns from people's feedback, and its evaluation.

`dataset` is what it is fitted on, and does not import torch; `model` fits, scores, exports and restores it.
"""
