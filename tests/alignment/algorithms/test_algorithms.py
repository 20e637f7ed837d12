"""The dict of algorithms is complete: each has a configuration and a hand-worked test."""

from pathlib import Path
from typing import get_args

from alignment.algorithms import ALGORITHMS
from alignment.config import TrainerConfig


def test_every_configuration_has_its_algorithm() -> None:
    algorithm = TrainerConfig.model_fields["algorithm"].annotation
    configured = {kind.model_fields["type"].default for kind in get_args(algorithm) or (algorithm,)}
    assert configured == set(ALGORITHMS)


def test_every_algorithm_is_worked_out_by_hand() -> None:
    here = Path(__file__).parent
    assert all((here / f"test_{name}.py").exists() for name in ALGORITHMS)
