"""Advantages and returns. They have no gradients, neither in Attune nor in a peer."""

from typing import Any

from tests.parity.case import TAME, Case

EPS = "verl adds 1e-8 to the counts that it whitens with"


def _group(title: str, peers: tuple[str, ...], groups: str = "group_B", **settings: Any) -> Case:
    return Case("group_advantage", title, "group_advantage", peers, {"groups": groups} | settings, (), ("plain",),
                bound32=1e-5, why="rewards 0.1 apart have fewer digits left when their mean is taken away")  # fmt: skip


CASES = [
    *(
        Case("gae_advantage", f"γ {gamma}, λ {lam}, then whitened", "gae_whitened", ("verl",),
             {"gamma": gamma, "lam": lam}, (), TAME, bound64=1e-8, why=EPS)
        for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0))
    ),
    *(
        Case("gae_advantage", f"γ {gamma}, λ {lam}", "gae", ("openrlhf",), {"gamma": gamma, "lam": lam}, (), ("plain",))
        for gamma, lam in ((1.0, 1.0), (0.99, 0.95))
    ),
    _group("GRPO", ("verl",), scale_by_std=True),
    _group("GRPO, groups of different sizes", ("verl",), "mixed_group_B", scale_by_std=True),
    _group("GRPO, eps as TRL's 1e-4", ("trl",), scale_by_std=True, eps=1e-4),
    _group("GRPO, eps as OpenRLHF's 1e-9", ("openrlhf",), scale_by_std=True, eps=1e-9),
    _group("Dr.GRPO", ("verl", "openrlhf"), scale_by_std=False),
    _group("Dr.GRPO", ("trl",), scale_by_std=False, eps=1e-4),
    _group("Dr.GRPO, groups of different sizes", ("verl",), "mixed_group_B", scale_by_std=False),
    Case("leave_one_out_advantage", "RLOO", "leave_one_out_advantage", ("verl", "trl", "openrlhf"),
         {"groups": "group_B"}, (), ("plain",)),
    Case("leave_one_out_advantage", "RLOO, groups of different sizes", "leave_one_out_advantage", ("verl",),
         {"groups": "mixed_group_B"}, (), ("plain",)),
    *(
        Case("reinforce_plus_plus_advantage", f"γ {gamma}", "reinforce_plus_plus", ("verl",), {"gamma": gamma}, (),
             TAME, bound64=1e-8, why=EPS)
        for gamma in (1.0, 0.9)
    ),
    Case("reinforce_plus_plus_advantage", "with the group's mean as baseline", "reinforce_plus_plus_baseline",
         ("verl",), {"groups": "mixed_group_B"}, (), TAME, bound64=1e-8, why=EPS),
    Case("overlong_penalty", "DAPO", "overlong_penalty", ("trl", "openrlhf"), {"longest": 80, "buffer": 20}, (),
         ("plain",)),
]  # fmt: skip
