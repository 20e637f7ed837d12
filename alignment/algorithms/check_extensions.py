"""Check that the code of other packages that settings name can be imported and fits its settings.

`python -m alignment.algorithms.check_extensions JSON`, for processes that do not import torch. Started in the folder in
which the trainer and the workers will run, it finds the same modules. It prints what is wrong, and ends with 1.
"""

import sys
from collections.abc import Callable
from functools import partial

from pydantic import BaseModel, ValidationError

from alignment.algorithms.registry import build
from alignment.config.algorithm_choice import AlgorithmConfig
from alignment.extensions import load_function
from alignment.release.gates import load_gate
from alignment.signals import verifiers
from alignment.signals.rules import load_rule


class NamedExtensions(BaseModel):
    """What settings name: an algorithm with its settings and its loss, and functions by name or import path."""

    algorithm: AlgorithmConfig | None = None
    rules: list[str] = []
    gates: list[str] = []
    verifiers: list[str] = []


def find_problem(named: NamedExtensions) -> str | None:
    """Return what is wrong with the first extension that cannot be used; None if all can."""
    checks: list[tuple[str, Callable[[], object]]] = []
    if named.algorithm is not None:
        checks.append(("algorithm", partial(build, named.algorithm)))
    checks += [("rewards.sources", partial(load_rule, name, allow_import=True)) for name in named.rules]
    checks += [("release.gates", partial(load_gate, name)) for name in named.gates]
    checks += [("rollouts.verifiers", partial(_load_verifier, name)) for name in named.verifiers]
    for section, load in checks:
        try:
            load()
        except ValidationError as error:
            return f"{section}: {'; '.join(_describe(error))}"
        except Exception as error:  # the code of others
            return f"{section}: {' '.join(str(error).split()) or type(error).__name__}"
    return None


def _load_verifier(name: str) -> object:
    return load_function(name, verifiers.ENTRY_POINTS, (), noun="verifier")


def _describe(error: ValidationError) -> list[str]:
    return [f"loss_params.{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()]


if __name__ == "__main__":
    problem = find_problem(NamedExtensions.model_validate_json(sys.argv[1]))
    if problem is not None:
        print(problem)
        raise SystemExit(1)
