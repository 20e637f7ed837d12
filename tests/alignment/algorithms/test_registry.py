"""All built-in algorithms are registered, and algorithms of other packages can be loaded."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter
from torch import Tensor

from alignment.algorithms import ALGORITHMS, RLAlgorithm, build
from alignment.config.algorithm import UpdateConfig
from alignment.config.algorithm_choice import AlgorithmConfig, CustomConfig
from alignment.errors import NothingToCompare, UnknownAlgorithm
from alignment.types import LossOutput, MicroBatch, Sample, TrainData


def test_every_configuration_has_an_algorithm() -> None:
    configured = {kind.model_fields["type"].default for kind in get_args(get_args(AlgorithmConfig)[0])}
    assert configured == {*ALGORITHMS, "custom"}
    for kind in get_args(get_args(AlgorithmConfig)[0]):
        if kind is not CustomConfig:
            assert type(build(kind())) is ALGORITHMS[kind().type]
            assert ALGORITHMS[kind().type].Config is kind


class CustomAlgorithmConfig(UpdateConfig):
    strength: float = 1.0


class CustomAlgorithm(RLAlgorithm):
    Config = CustomAlgorithmConfig
    needs_reference = False

    def compute_advantages(self, batch: TrainData) -> Tensor:
        return batch.rewards_B

    def compute_loss(self, inputs: MicroBatch) -> LossOutput:
        return LossOutput(-self.config.strength * inputs.advantages_BT * inputs.logprobs_BT)


@pytest.mark.parametrize(
    "name",
    [
        "tests.alignment.algorithms.test_registry:CustomAlgorithm",
        "tests.alignment.algorithms.test_registry.CustomAlgorithm",
    ],
)
def test_custom_class_is_loaded_by_its_path(name: str) -> None:
    algorithm = build(CustomConfig(name=name, epochs=3, options={"strength": 2.0}))
    assert type(algorithm).__name__ == "CustomAlgorithm"
    assert (algorithm.config.strength, algorithm.config.epochs) == (2.0, 3)


def test_custom_algorithm_uses_its_defaults_unless_they_are_set() -> None:
    algorithm = build(CustomConfig(name="alignment.algorithms.dpo_and_kto:DPO"))
    assert algorithm.config.max_kl is None
    assert build(CustomConfig(name="alignment.algorithms.dpo_and_kto:DPO", max_kl=0.3)).config.max_kl == 0.3


@pytest.mark.parametrize("option", ["max_kl", "epochs", "minibatches"])
def test_options_cannot_replace_the_settings_of_an_update(option: str) -> None:
    """Otherwise `options` would escape the KL limit that the service sets."""
    with pytest.raises(ValueError, match=f"{option} must stand beside options"):
        CustomConfig(name="alignment.algorithms.dpo_and_kto:DPO", options={option: None})


def test_custom_class_is_loaded_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module and its metadata in the layout of pip."""
    (tmp_path / "market_rl.py").write_text(
        "from alignment.algorithms import RLAlgorithm\nclass Shop(RLAlgorithm):\n    needs_old_logprobs = False\n"
    )
    info = tmp_path / "market_rl-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: market-rl\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attune.algorithms]\nshop = market_rl:Shop\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    algorithm = build(CustomConfig(name="shop"))
    assert type(algorithm).__name__ == "Shop" and not algorithm.needs_old_logprobs


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpoo", "did you mean 'grpo'. Known are .*grpo"),
        ("dr.grpo", r"cannot be imported: No module named 'dr' \(did you mean 'dr_grpo'\?\)\. Name a class"),
        ("missing.package:Algorithm", "cannot be imported"),
        ("tests.alignment.algorithms.test_registry:Missing", "cannot be imported"),
        ("builtins:int", "not a subclass"),
    ],
)
def test_unknown_name_error_states_the_cause(name: str, message: str) -> None:
    with pytest.raises(UnknownAlgorithm, match=message):
        build(CustomConfig(name=name))


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(UnknownAlgorithm, match="strenght"):
        build(CustomConfig(name="tests.alignment.algorithms.test_registry:CustomAlgorithm", options={"strenght": 1.0}))


GROUP_BASELINE = {"type": "reinforce++", "baseline": "group"}


@pytest.mark.parametrize("settings", [*({"type": name} for name in sorted(ALGORITHMS)), GROUP_BASELINE], ids=str)
def test_the_configuration_says_whether_the_algorithm_needs_groups(settings: dict[str, str]) -> None:
    """Assembly asks it before it freezes a batch, without torch."""
    algorithm = build(TypeAdapter(AlgorithmConfig).validate_python(settings))
    samples = [Sample(str(i), (1,), (2,), (-0.5,), reward=(-1.0) ** i, version=0, group=str(i)) for i in range(4)]
    try:
        algorithm.select(samples)
        needs_groups = False
    except NothingToCompare:
        needs_groups = True
    assert algorithm.config.needs_groups == needs_groups
    algorithm.select([replace(sample, group="one prompt") for sample in samples])
