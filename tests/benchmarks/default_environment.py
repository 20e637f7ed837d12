"""The environment of a benchmark that starts what `attune up` starts: defaults, whatever the shell exports."""

import os
from pathlib import Path

from tests.support.engine_fixture import free_port


def set_default_environment(home: str, model: Path, **changes: str) -> None:
    """Set every setting to its default, except for what separates runs and for `changes`, which are variables.

    Example: set_default_environment("/tmp/run-1", DEMO_MODEL, ATTUNE_TRAINER__SEED="1")
    """
    for name in [name for name in os.environ if name.startswith("ATTUNE_")]:
        del os.environ[name]
    os.environ |= {
        "ATTUNE_HOME": home,
        "ATTUNE_MODEL": str(model),
        "ATTUNE_SERVER__PORT": str(free_port()),
        "ATTUNE_ENGINE__PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        **changes,
    }
