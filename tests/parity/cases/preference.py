"""Losses on pairs of replies and on binary feedback."""

from typing import Any

from tests.parity.case import Case

PAIR = ("chosen_P", "rejected_P")


def _pair(kind: str, peers: tuple[str, ...], title: str = "", **settings: Any) -> Case:
    settings = {"beta": 0.1, "kind": kind} | settings
    return Case("dpo_loss", title or kind, "dpo_loss", peers, settings, PAIR, ("plain",))


def _binary(kind: str, title: str = "", **settings: Any) -> Case:
    settings = {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.8, "kind": kind} | settings
    return Case("kto_loss", title or kind, "kto_loss", ("trl",), settings, ("logps_B",), ("plain",))


CASES = [
    _pair("sigmoid", ("trl", "openrlhf")),
    _pair("sigmoid", ("trl", "openrlhf"), "sigmoid, β 2", beta=2.0),
    _pair("sigmoid", ("openrlhf",), "sigmoid, label smoothing (cDPO)", label_smoothing=0.1),
    _pair("ipo", ("trl",), by_length=True),
    Case("dpo_loss", "ipo, all lengths 1", "ipo_of_sums", ("openrlhf",), {"beta": 0.1}, PAIR, ("plain",)),
    *(
        Case("dpo_loss", kind, "preference_loss", ("areal",), {"beta": 0.1, "kind": kind, "by_length": True}, PAIR,
             ("plain",), bound64=1e-6, why="AReaL computes it in float32")
        for kind in ("sigmoid", "ipo")
    ),
    _pair("hinge", ("trl",)),
    _pair("robust", ("trl",), label_smoothing=0.1),
    _pair("apo_zero", ("trl",)),
    _pair("apo_down", ("trl",)),
    _binary("kto"),
    _binary("kto", "kto, KL estimated below 0", kl_below_zero=True),
    _binary("kto", "kto, desirable replies only", only="desirable"),
    _binary("kto", "kto, undesirable replies only", only="undesirable"),
    _binary("apo_zero_unpaired"),
    _binary("apo_zero_unpaired", "apo_zero_unpaired, undesirable replies only", only="undesirable"),
]  # fmt: skip
