"""Losses of reward models."""

from tests.parity.case import Case

CASES = [
    Case("bradley_terry_loss", "mean over pairs", "bradley_terry_loss", ("trl", "openrlhf", "areal"), {},
         ("chosen_P", "rejected_P"), ("plain",)),
]  # fmt: skip
