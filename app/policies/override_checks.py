"""Checks on a policy's own settings: each problem is one sentence that says what to do.

They may name no code and no keys of the deployment, and use no more of what all policies share than the deployment
allows: an admin of a project does not operate the deployment.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from alignment import extensions
from alignment.config.algorithm_choice import ALGORITHM_ENTRY_POINTS, ALGORITHM_NAMES, AlgorithmConfig, CustomConfig
from alignment.config.policy_gradient_algorithms import PolicyGradientConfig
from alignment.config.rewards import EndpointConfig, RewardsConfig, RuleSource
from alignment.config.rollouts import RolloutsConfig, exceeded_limit
from alignment.release.gates import FunctionGate, Gate, PromptsGate
from alignment.signals import verifiers
from alignment.signals.rules import ENTRY_POINTS, RULES
from alignment.signals.verifiers import Custom
from app.core.errors import BadRequest
from app.core.settings import Settings
from app.core.settings.problems import explain, find_wrong_types
from app.core.settings.root import parse_algorithm
from app.core.settings.tree import did_you_mean, find, is_typed_table, nearest
from app.policies.overrides import SECTIONS, Own, find_shared, leaf_paths, overlay

MAX_STEPS = 64  # optimizer steps of an update; more where the deployment itself makes more
MAX_PROBLEMS = 5  # that one error names
OWN_CODE = "only the deployment's own settings may name code by its path."


def merge(own: Own, patch: Mapping[str, object], settings: Settings) -> Own:
    """Return a policy's own values after a change, checked.

    `patch` replaces them value by value; null removes one, so that the deployment's holds again (RFC 7396). Another
    type of algorithm replaces all values of the algorithm before.

    Raises BadRequest with a sentence for each problem: an unknown setting, one that all policies share, a wrong type, a
    combination that cannot work, or more than the deployment allows.
    """
    if problems := list(_find_misplaced(patch)):
        raise problems[0]
    merged = merge_patch(own, {name: value for name, value in patch.items() if name != "algorithm"})
    if "algorithm" in patch:
        merged["algorithm"] = _merge_algorithm(own.get("algorithm"), patch["algorithm"], settings)
    merged = {name: values for name, values in merged.items() if values is not None and values != {}}
    if errors := find_wrong_types(merged):
        raise _bad_request(explain(errors, {}))
    check(merged, settings)
    return merged


def merge_patch(values: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, Any]:
    """Merge tables; null removes a value, and a table that it leaves empty."""
    merged = dict(values)
    for name, value in patch.items():
        if isinstance(value, Mapping):
            before = merged.get(name)
            value = merge_patch(before if isinstance(before, Mapping) else {}, value)
            if not value and patch[name]:
                value = None
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def _merge_algorithm(before: Mapping[str, Any] | None, value: Any, settings: Settings) -> Any:
    if isinstance(value, str):
        value = parse_algorithm(value)
        value.pop("epochs", None)  # the default, which `overlay` leaves to the deployment
    if not isinstance(value, Mapping):
        return value
    type_before = (before or {}).get("type", settings.algorithm.type)
    kind = value.get("type") or type_before
    merged = {"type": kind} | merge_patch(before or {} if kind == type_before else {}, value)
    return merged if before or "type" in value or len(merged) > 1 else None


def _find_misplaced(patch: Mapping[str, object]) -> Iterator[BadRequest]:
    """Yield an error for each value that is no setting of a policy."""
    for path in leaf_paths(patch):
        parts = tuple(path.split("."))
        is_setting = find(Settings, parts) is not None
        if not is_setting and is_typed_table(Settings, parts[:-1]):
            continue  # `check` knows the type, and with it the names
        if not is_setting:
            hints = [hint for hint in nearest(Settings, path) if hint.partition(".")[0] in SECTIONS]
            message = f"{path} is not a setting{did_you_mean([hint for hint in hints if find_shared(hint) is None])}"
            yield BadRequest(message, param=path, code="unknown_parameter")
        elif path.partition(".")[0] not in SECTIONS:
            why = f"policies have settings of their own in {', '.join(SECTIONS)}; the others are the deployment's"
            yield _cannot_differ(path, why)
        elif (reason := find_shared(path)) is not None:
            yield _cannot_differ(path, reason)


def _cannot_differ(path: str, why: str) -> BadRequest:
    return invalid_value(path, f"it cannot differ between policies: {why}.")


def check(own: Own, settings: Settings) -> Settings:
    """Return the settings that a policy with these own values has. Raises BadRequest, as `merge` does."""
    data = {name: getattr(settings, name) for name in settings.model_fields_set}
    for name, values in own.items():
        data[name] = overlay(settings, name, values) if isinstance(values, Mapping) else values
    try:
        effective = Settings.model_validate(data)
    except ValidationError as error:
        raise _bad_request(explain(error.errors(include_url=False), {})) from error
    if "algorithm" in own:
        _check_code(effective.algorithm, settings.algorithm)
    if "algorithm" in own or "trainer" in own:
        _check_size(effective, settings)
    if "rewards" in own:
        check_rewards(effective.rewards, settings, "rewards.")
    if "rollouts" in own:
        check_rollouts(effective.rollouts, settings, "rollouts.")
    if "gates" in own.get("release", {}):
        for index, gate in enumerate(effective.release.gates):
            _check_gate(gate, f"release.gates.{index}", settings)
    return effective


def _bad_request(problems: list[str]) -> BadRequest:
    path = problems[0].partition(":")[0]
    param = path if find(Settings, tuple(path.split("."))) is not None else "settings"
    return BadRequest("; ".join(problems[:MAX_PROBLEMS]), param=param, code="invalid_value")


def _check_code(algorithm: AlgorithmConfig, deployment: AlgorithmConfig) -> None:
    """Refuse an algorithm or a loss by its import path, unless it is the deployment's own."""
    if isinstance(algorithm, CustomConfig) and getattr(deployment, "name", None) != algorithm.name:
        known = extensions.extension_names(ALGORITHM_ENTRY_POINTS, ALGORITHM_NAMES)
        if algorithm.name not in known:
            raise invalid_value("algorithm", f"{OWN_CODE} Known algorithms are {', '.join(known)}.")
    loss = algorithm.loss if isinstance(algorithm, PolicyGradientConfig) else ""
    if ":" in loss and getattr(deployment, "loss", None) != loss:
        raise invalid_value("algorithm.loss", OWN_CODE)


def _check_size(effective: Settings, settings: Settings) -> None:
    """Limit how long one update of the policy can keep the trainer from the other policies."""
    largest, most = effective.trainer.largest_batch, settings.trainer.largest_batch
    if largest > most:
        message = (
            f"an update could have {largest} samples, and the deployment allows {most}; max_batch_size is four times "
            "batch_size when unset."
        )
        raise invalid_value("trainer.max_batch_size", message)
    own, deployment = effective.algorithm, settings.algorithm
    steps, limit = own.epochs * own.minibatches, max(MAX_STEPS, deployment.epochs * deployment.minibatches)
    if steps > limit:
        message = f"epochs times minibatches is {steps}; an update of a policy may make at most {limit} steps."
        raise invalid_value("algorithm.epochs", message)


def check_rewards(config: RewardsConfig, settings: Settings, prefix: str = "") -> None:
    """Raise BadRequest for code by its path, and for a key of the deployment that is not sent to its own address."""
    for index, source in enumerate(config.sources):
        if isinstance(source, RuleSource):
            _check_rule(source, f"{prefix}sources.{index}.function", settings)
        if isinstance(source, EndpointConfig):
            _check_endpoint(source, f"{prefix}sources.{index}", settings)


def check_rollouts(config: RolloutsConfig, settings: Settings, prefix: str = "") -> None:
    """Raise BadRequest for more than the deployment's limits."""
    if (name := exceeded_limit(config, settings.rollouts)) is not None:
        raise invalid_value(f"{prefix}{name}", "more than the deployment's ATTUNE_ROLLOUTS allows.")


def _check_rule(source: RuleSource, param: str, settings: Settings) -> None:
    if source in settings.rewards.sources:
        return
    if ":" in source.function:
        raise invalid_value(param, OWN_CODE)
    known = sorted({*RULES, *(point.name for point in entry_points(group=ENTRY_POINTS))})
    if source.function not in known:
        raise invalid_value(param, f"known rules are {', '.join(known)}.")


def _check_endpoint(source: EndpointConfig, param: str, settings: Settings) -> None:
    """Refuse passwords in addresses, and the deployment's keys for any address but the deployment's own."""
    if source in settings.rewards.sources:
        return
    if "@" in urlsplit(source.url).netloc:
        raise invalid_value(f"{param}.url", "an address must not contain a password.")
    allowed = {(own.url, own.key) for own in settings.rewards.sources if isinstance(own, EndpointConfig)}
    if source.key is not None and (source.url, source.key) not in allowed:
        message = "a key is sent only to the address that the deployment's own rewards send it to."
        raise invalid_value(f"{param}.key", message)


def _check_gate(gate: Gate, param: str, settings: Settings) -> None:
    if isinstance(gate, FunctionGate) and ":" in gate.function:
        raise invalid_value(f"{param}.function", OWN_CODE)
    if isinstance(gate, PromptsGate) and isinstance(gate.verifier, Custom):
        check_verifier_name(gate.verifier, f"{param}.verifier.name", settings)


def check_verifier_name(verifier: Custom, param: str, settings: Settings) -> None:
    """Raise BadRequest unless the verifier is an entry point, or one of the deployment's own."""
    known = extensions.extension_names(verifiers.ENTRY_POINTS, settings.rollouts.verifiers)
    if verifier.name not in known:
        raise invalid_value(param, f"known verifiers are {', '.join(known) or 'none'}.")


def invalid_value(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param, code="invalid_value")
