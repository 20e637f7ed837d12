"""Reads the settings: `attune.toml`, overridden by the environment. This is the only module that reads either."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.core.settings.problems import explain, find_wrong_types
from app.core.settings.renamed import RENAMED
from app.core.settings.root import Settings, parse_algorithm
from app.core.settings.tree import did_you_mean, find, is_number, is_text, is_typed_table, nearest, variable_name

PREFIX = "ATTUNE_"
CONFIG_VARIABLE = "ATTUNE_CONFIG"
DEFAULT_FILE = Path("attune.toml")
# Variables of the Makefile and the tests. Kubernetes sets the others for a service named "attune".
OTHER_VARIABLES = re.compile(
    r"ATTUNE_(CONFIG|FULL|SHUFFLE|FUZZ_\w+|TEST_\w+|REQUIRE_\w+|\w+_FLAGS)"
    r"|ATTUNE_(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)"
)


class SettingsError(ValueError):
    """The settings are invalid. `problems` has a sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the settings are invalid:\n  " + "\n  ".join(problems) if problems[1:] else problems[0])


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and by path where each value that was given comes from: the file's name or a variable's."""

    settings: Settings
    sources: Mapping[str, str]
    file: Path | None


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the settings of this process. Raises SettingsError."""
    return load_settings().settings


def load_settings(environ: Mapping[str, str] = os.environ) -> LoadedSettings:
    """Read the file and the environment. Raises SettingsError, which names every problem."""
    file = config_file(environ)
    from_file = {} if file is None else _read_file(file)
    from_environment, variables, problems = _read_environment(environ)
    sources = {path: str(file) for path in _flatten(from_file)} | variables
    values = _merge(from_file, from_environment)
    texts = {path for path, name in variables.items() if not isinstance(_parse(environ[name]), dict | list)}
    errors = find_wrong_types(values, texts)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        errors += error.errors(include_url=False)
    if problems := problems + explain(errors, sources):
        raise SettingsError(problems)
    return LoadedSettings(settings, sources, file)


def config_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the settings: $ATTUNE_CONFIG, else attune.toml in the current folder if there is one."""
    if name := environ.get(CONFIG_VARIABLE):
        return Path(name)
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def _read_file(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError([f"{file} cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        is_twice = "overwrite" in str(error) or "twice" in str(error)
        hint = '; a name or a section is there twice (write [algorithm] with type = "grpo")' if is_twice else ""
        raise SettingsError([f"{file} is not valid TOML: {error}{hint}"]) from error


def _read_environment(environ: Mapping[str, str]) -> tuple[dict[str, object], dict[str, str], list[str]]:
    """Return the values as nested tables, the variables by path, and what is wrong with their names."""
    tables: dict[str, object] = {}
    variables: dict[str, str] = {}
    problems: list[str] = []
    names = (name for name, value in environ.items() if name.startswith(PREFIX) and value.strip())
    for name in sorted(names, key=lambda name: (name.count("__"), name)):  # a table before its values
        value = environ[name]
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        annotation = find(Settings, path)
        if annotation is not None or is_typed_table(Settings, path[:-1]):  # whose names its `type` decides about
            parsed: Any = value if is_text(annotation) else _parse(value)
            if isinstance(parsed, bool) and is_number(annotation):
                parsed = value
            variables[".".join(path)] = name
            tables = _merge(tables, reduce(lambda inner, part: {part: inner}, reversed(path), parsed))
        elif OTHER_VARIABLES.fullmatch(name) is None and not value.startswith("tcp://"):
            problems.append(_unknown_variable(name, ".".join(path)))
    return tables, variables, problems


def _parse(value: str) -> object:
    """Return a value that may be JSON: a number, a list, a table."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _unknown_variable(name: str, path: str) -> str:
    if (renamed := RENAMED.get(name)) is not None:
        return f"{name} is now {variable_name(renamed)} ({renamed} in {DEFAULT_FILE})"
    hints = [variable_name(hint) for hint in nearest(Settings, path)]
    hints = hints or [variable_name(RENAMED[old]) for old in get_close_matches(name, RENAMED, n=1, cutoff=0.8)]
    return f"{name} is not a setting{did_you_mean(hints)}"


def _merge(base: Mapping[str, object], override: Mapping[str, object]) -> dict[str, object]:
    """Merge tables. A table of another `type` replaces the one before, whose values belong to that type."""
    merged = dict(base)
    for name, value in override.items():
        before = merged.get(name)
        if name == "algorithm":
            before, value = (None if before is None else parse_algorithm(before)), _named_type(value)
        if isinstance(before, dict) and isinstance(value, dict):
            is_same_type = value.get("type", before.get("type")) == before.get("type")
            merged[name] = _merge(before, value) if is_same_type else value
        else:
            merged[name] = value
    return merged


def _named_type(algorithm: object) -> object:
    """Return the algorithm as a table, without a type where none is named."""
    return parse_algorithm(algorithm) if isinstance(algorithm, str) else algorithm


def _flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the paths of a table's values."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
