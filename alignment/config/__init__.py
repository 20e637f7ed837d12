"""Typed settings of the trainer, the algorithms, rewards and rollouts. Torch-free."""
