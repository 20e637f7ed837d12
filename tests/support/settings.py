"""Settings by the last part of their names, and as environment variables, for tests that change a few of them."""

from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr, TypeAdapter

from app.core.settings import Settings
from app.core.settings.tree import find, is_text, leaves


def by_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by path: {"batch_size": 8} -> {"trainer.batch_size": 8}.

    Of several settings with the name, the one that is less deep is meant. A double underscore separates the parts of a
    name that is still not unique: `server__port`. Raises KeyError for others.
    """
    return {_path(name): value for name, value in values.items()}


def _path(name: str) -> str:
    if name in Settings.model_fields:
        return name
    if "__" in name:
        return name.replace("__", ".")
    paths = [leaf.path for leaf in leaves(Settings) if leaf.path.rpartition(".")[2] == name]
    depth = min((path.count(".") for path in paths), default=0)
    shallow = [path for path in paths if path.count(".") == depth]
    if len(shallow) != 1:
        raise KeyError(f"{name} is {' or '.join(paths) or 'no setting'}")
    return shallow[0]


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables of the settings that differ from their defaults."""
    variables = {}
    for leaf in leaves(Settings):
        value: Any = settings
        for name in leaf.path.split("."):
            value = getattr(value, name)
        if value == leaf.default or value is None:
            continue
        if leaf.path == "secrets":
            value = {name: secret.get_secret_value() for name, secret in value.items() if isinstance(secret, SecretStr)}
        is_plain = is_text(leaf.annotation)
        variables[leaf.variable] = str(value) if is_plain else TypeAdapter(Any).dump_json(value).decode()
    return variables


def is_variable(name: str) -> bool:
    """Whether an environment variable is that of a setting."""
    return find(Settings, tuple(name.removeprefix("ATTUNE_").lower().split("__"))) is not None


def change_in_place(settings: Settings, values: Mapping[str, Any]) -> None:
    """Change settings that a running application holds. Values are named as in `by_path`."""
    changed = settings.replace(by_path(values))
    settings.__dict__.update(changed.__dict__)
    settings.model_fields_set.update(changed.model_fields_set)  # `replace` goes on from these


def other_value(annotation: Any, default: Any) -> Any:
    """Return another value of a setting of this type than its default. Raises AssertionError if none can be derived."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default / 2 if default else 0.25
    if default is None:
        return 7 if "int" in str(annotation) else 0.004 if "float" in str(annotation) else "other"
    if isinstance(default, str):
        choices = [choice for choice in getattr(annotation, "__args__", ()) if choice != default]
        return choices[0] if choices else "other"
    raise AssertionError(f"no other value of {annotation}, whose default is {default!r}")
