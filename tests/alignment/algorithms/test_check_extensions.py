"""Code of other packages that cannot be used is named in one sentence, with the setting that names it."""

from pathlib import Path
from typing import Any

import pytest

from alignment.algorithms.check_extensions import NamedExtensions, find_problem

MODULE = """
from pydantic import BaseModel
from alignment.algorithms import TokenLoss, register_policy_loss
from alignment.algorithms.ppo import PPO

class Params(BaseModel):
    tau: float = 0.2

@register_policy_loss("checked_loss", Params)
def loss(inputs, params):
    return TokenLoss(-inputs.advantages_BT)

class Mine(PPO):
    pass

def function(turn):
    return None
"""


def algorithm(**fields: Any) -> dict[str, Any]:
    return {"algorithm": {"type": "ppo", **fields}}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, None),
        ({"algorithm": {"type": "custom", "name": "checked:Mine"}}, None),
        (algorithm(loss="checked:loss", loss_params={"tau": 1}), None),
        ({"rules": ["checked:function"], "gates": ["checked:function"], "verifiers": ["checked:function"]}, None),
        ({"algorithm": {"type": "custom", "name": "checked:No"}}, "algorithm: 'checked:No' cannot be imported: "),
        ({"algorithm": {"type": "custom", "name": "checked:function"}}, "not a subclass"),
        ({"algorithm": {"type": "custom", "name": "checked:Mine", "options": {"a": 1}}}, "do not fit its Config: a: "),
        (algorithm(loss="checked:function"), "has no decorator register_policy_loss"),
        (algorithm(loss="checked:loss", loss_params={"tua": 1}), "algorithm: loss_params.tua: Extra inputs"),
        ({"rules": ["checked:no"]}, "rewards.sources: 'checked:no' cannot be imported"),
        ({"gates": ["unchecked:no"]}, "release.gates: 'unchecked:no' cannot be imported: No module named"),
        ({"verifiers": ["checked:function", "checked:no"]}, "rollouts.verifiers: 'checked:no' cannot be imported"),
        ({"rules": ["broken:no"]}, "rewards.sources: division by zero"),
    ],
)
def test_each_problem_is_one_sentence(
    named: dict[str, Any], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    problem = find_problem(NamedExtensions.model_validate(named))
    assert problem is None if expected is None else problem is not None and expected in problem and "\n" not in problem
