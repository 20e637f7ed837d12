"""What `attune up` checks on this machine before it starts anything: each would make a process exit again and again.

None needs the network or a database. `attune config check` reports the same, in the same words.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import orjson

from alignment.artifacts.specs import AdapterSpec
from alignment.config.algorithm_choice import CustomConfig
from alignment.config.policy_gradient_algorithms import PolicyGradientConfig, PolicyLossKind
from alignment.config.rewards import RuleSource
from alignment.release.gates import FunctionGate
from alignment.signals.rules import RULES
from app.core.processes import port_error
from app.core.settings import Settings
from app.core.settings.derived import lora_config, trainer_config
from app.inference.model_support import require_supported
from app.ops.diagnostics import Check, Finding, Level, check_engine_environment, check_model
from app.ops.experiment_log import require_trackers
from app.policies.adapter_shape import require_adapter_shape
from app.policies.machine_fit import gpu_memories, require_fit
from app.policies.model_description import describe_by_program

IMPORT_SECONDS = 300.0  # an import of torch and of a user's package, on a machine that is busy


def check_devices(settings: Settings) -> Iterator[Finding]:
    """Check that this machine has the GPUs that the settings name."""
    named = [f"{name}.device" for name in ("engine", "trainer") if getattr(settings, name).device == "cuda"]
    tp_size = settings.engine.tp_size
    if not named and tp_size == 1:
        return
    gpus = len(gpu_memories())
    if named and not gpus:
        fix = "Set it to auto or cpu, or install the driver: nvidia-smi must list the GPUs."
        yield Finding("devices", Level.PROBLEM, f"{' and '.join(named)} is cuda, and this machine has no GPU", fix)
    elif tp_size > gpus:
        fix = "Set ATTUNE_ENGINE__TP_SIZE to at most the number of GPUs."
        found = f"engine.tp_size is {tp_size}, and this machine has {gpus or 'no'} GPU{'s' if gpus > 1 else ''}"
        yield Finding("devices", Level.PROBLEM, found, fix)


def check_extensions(settings: Settings) -> Iterator[Finding]:
    """Check that the algorithms, losses and functions of your own can be imported and take their settings."""
    if (named := _named_extensions(settings)) is None:
        return
    command = [sys.executable, "-m", "alignment.algorithms.check_extensions", orjson.dumps(named).decode()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        fix = "Import it in a Python shell to see what it waits for."
        yield Finding("extensions", Level.PROBLEM, f"the import takes more than {IMPORT_SECONDS:.0f} s", fix)
        return
    if result.returncode != 0:
        lines = (result.stdout.strip() or result.stderr.strip() or f"exit code {result.returncode}").splitlines()
        fix = f"Install its package into {sys.prefix}, or correct the name or the settings."
        yield Finding("extensions", Level.PROBLEM, lines[-1], fix)


def _named_extensions(settings: Settings) -> dict[str, object] | None:
    """Return what `alignment.algorithms.check_extensions` reads; None if everything is built in."""
    config = settings.algorithm
    is_own = isinstance(config, CustomConfig) or (
        isinstance(config, PolicyGradientConfig) and config.loss not in get_args(PolicyLossKind)
    )
    algorithm = trainer_config(settings).algorithm.model_dump(mode="json", exclude_unset=True) if is_own else None
    sources, gates = settings.rewards.sources, settings.release.gates
    rules = [source.function for source in sources if isinstance(source, RuleSource) and source.function not in RULES]
    functions = [gate.function for gate in gates if isinstance(gate, FunctionGate)]
    verifiers = list(settings.rollouts.verifiers.values())
    if algorithm is None and not (rules or functions or verifiers):
        return None
    if algorithm is not None:
        algorithm["type"] = config.type
    return {"algorithm": algorithm, "rules": rules, "gates": functions, "verifiers": verifiers}


def check_target_modules(settings: Settings) -> Iterator[Finding]:
    """Check that the base model has the layers of `trainer.lora.target_modules`, if any are named."""
    folder, lora = Path(settings.model), lora_config(settings)
    if lora is None or lora.target_modules is None or not (folder / "config.json").exists():
        return
    try:
        AdapterSpec.from_model(describe_by_program(folder), lora)
    except ValueError as error:
        yield Finding("target_modules", Level.PROBLEM, str(error), "Correct trainer.lora.target_modules, or remove it.")


def check_trackers(settings: Settings) -> Iterator[Finding]:
    yield from _refusal("trackers", partial(require_trackers, settings.observability.trackers))


def check_supported(settings: Settings) -> Iterator[Finding]:
    yield from _refusal("supported", partial(check_base_model, settings))


def check_adapter_shape(settings: Settings) -> Iterator[Finding]:
    yield from _refusal("adapter_shape", partial(require_adapter_shape, settings))


def check_memory(settings: Settings) -> Iterator[Finding]:
    yield from _refusal("memory", partial(require_fit, settings))


def _refusal(name: str, require: Callable[[], None]) -> Iterator[Finding]:
    """Yield a problem if a requirement raises ValueError, whose sentence also says what to do."""
    try:
        require()
    except ValueError as error:
        yield Finding(name, Level.PROBLEM, str(error))


START_CHECKS: tuple[Check, ...] = (
    check_trackers,
    check_model,
    check_engine_environment,
    check_devices,
    check_extensions,
    check_target_modules,
    check_supported,
    check_adapter_shape,
    check_memory,
)


def check_ports_are_free(settings: Settings) -> None:
    """Raise ValueError if another process listens on our ports: it would answer in place of this service."""
    for name, host, port in (
        ("ATTUNE_SERVER__PORT", settings.server.host, settings.server.port),
        ("ATTUNE_ENGINE__PORT", settings.engine.host, settings.engine.port),
    ):
        if (reason := port_error(host, port)) is not None:
            raise ValueError(f"{host}:{port} is taken ({reason}); is Attune already running? Otherwise set {name}")


def check_base_model(settings: Settings) -> None:
    """Raise ValueError if engines are known to compute the base model wrongly, before anything is started.

    One that is not downloaded yet is checked by the engine and the trainer.
    """
    if (Path(settings.model) / "config.json").exists():
        require_supported(settings, Path(settings.model))


def start_problems(settings: Settings, *, with_ports: bool = True) -> Iterator[str]:
    """Yield a sentence for each problem on this machine that no restart would mend: what is wrong, and how to mend it.

    Args:
        with_ports: Whether the ports must be free. They are not while the service of this home runs.
    """
    checks: list[Check] = [_check_ports, *START_CHECKS] if with_ports else [*START_CHECKS]
    for check in checks:
        for finding in check(settings):
            if finding.level == Level.PROBLEM:
                yield f"{finding.found.rstrip('.')}. {finding.fix}" if finding.fix else finding.found


def _check_ports(settings: Settings) -> Iterator[Finding]:
    yield from _refusal("ports", partial(check_ports_are_free, settings))


def require_startable(settings: Settings) -> None:
    """Raise ValueError with the first of the problems on this machine."""
    for problem in start_problems(settings):
        raise ValueError(problem)
