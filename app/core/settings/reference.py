"""Settings as text: a file to start from, the values that apply, and the reference page."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from alignment.config.algorithm_choice import CustomConfig
from app.core.settings.derived import derived_values
from app.core.settings.engine import REPOSITORY
from app.core.settings.loading import LoadedSettings
from app.core.settings.renamed import RENAMED
from app.core.settings.root import DEFAULT_EPOCHS, Settings
from app.core.settings.tree import Leaf, description, find, leaves, members, models, printable, variable_name

UNSET = "unset"
TYPE_NAMES = {
    "Path": "path",
    "HttpUrl": "URL",
    "str": "text",
    "SecretStr": "text",
    "bool": "true, false",
}

INTRODUCTION = """\
# Settings

Write the settings that you change into `attune.toml` in the folder that you start `attune` from, or into the file that
`ATTUNE_CONFIG` names. An environment variable overrides the file: `ATTUNE_`, then the path in capitals with `__` for
each dot, so `ATTUNE_TRAINER__OPTIM__LR=1e-4` is `lr` in `[trainer.optim]`. In variables, lists and tables are JSON.

```
attune config init            # write attune.toml with the settings and their defaults, commented out
attune config check           # is it valid, and can `attune up` start here? one sentence for each problem
attune config show --source   # the settings with their defaults, and where each comes from; secrets are hidden
```

An unknown name is an error that names the nearest setting. A wrong type is an error too: in the file and in JSON,
`"24"` and `true` are no numbers; the text of a variable is parsed. Relative paths start at the current folder. Use
one file for all processes of a deployment; what may differ by process is `home` ([deploying.md](deploying.md)),
`engine.name`, `engine.versions_url`, addresses, ports and devices. `trainer.adaptation` and `trainer.lora` are fixed
by the first version of a `home`. A policy may have its own values in the sections trainer, algorithm, rewards,
rollouts and release ([policies.md](policies.md)). The file that `attune config init` writes has every setting but
those of the algorithms, which are at the end of this page.
"""


def template() -> str:
    """Return a file with every setting but the algorithms', its description and its default, each commented out."""
    lines = [
        "# Settings of Attune. Remove the # before a setting to change it. An environment variable overrides it:",
        "# ATTUNE_TRAINER__BATCH_SIZE overrides batch_size in [trainer]. See docs/settings.md.",
    ]
    for section, fields in _sections():
        header = f"[{section}]" if section else ""
        lines += ["", f"# {header}" if _is_optional(section) else header] if section else [""]
        for leaf in fields:
            name = leaf.path.rpartition(".")[2]
            default = _default(leaf)
            lines += [f"# {leaf.description}"] if leaf.description else []
            lines.append(f"# {name} = {default if default != UNSET else ''}".rstrip())
    return "\n".join(lines) + "\n"


def show(loaded: LoadedSettings, *, with_sources: bool = False) -> str:
    """Return the settings with their defaults as TOML, without secrets, and where each comes from.

    A note says which value applies where a setting is unset, or limited by another one.
    """
    derived, by_section = derived_values(loaded.settings), {"": list[str]()}
    for leaf, value, sources in values_with_sources(loaded.settings, loaded.sources):
        section, _, name = leaf.path.rpartition(".")
        if value is None and leaf.default is None:
            text = f"# {name} is not set"
        else:
            text = f"{name} = {to_toml(False if value is None else printable(leaf.path, value))}"
        notes = [", ".join(sources) or "default"] if with_sources else []
        if (applies := derived.get(leaf.path, value)) != value:
            if isinstance(applies, dict):
                applies = {key: item for key, item in applies.items() if item != value.get(key)}
            notes.append(f"{to_toml(printable(leaf.path, applies))} applies")
        by_section.setdefault(section, []).append("  # ".join([text, *notes]))
    tables = ([f"[{section}]", *lines] if section else lines for section, lines in by_section.items())
    return "\n\n".join(map("\n".join, tables)) + "\n"


def values_with_sources(settings: Settings, sources: Mapping[str, str]) -> Iterator[tuple[Leaf, Any, list[str]]]:
    """Yield each setting with its value as JSON, and with where it, or a part of it, was given; nowhere: a default.

    Args:
        sources: By path, where a value was given.
    """
    values = TypeAdapter(Settings).dump_python(settings, mode="json")
    for leaf in leaves(Settings):
        origins = {source for path, source in sources.items() if f"{path}.".startswith(f"{leaf.path}.")}
        yield leaf, reduce(getitem, leaf.path.split("."), values), sorted(origins)


def to_toml(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, dict):
        pairs = (f"{_key(name)} = {to_toml(item)}" for name, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def reference() -> str:
    """Return the reference page: every setting with its type, its default and its description."""
    lines = INTRODUCTION.splitlines()
    for section, fields in _sections():
        lines += ["", f"## {f'[{section}]' if section else 'At the top of the file'}", ""]
        if section and (text := _section_text(models(find(Settings, tuple(section.split(".")))))):
            lines += [text, ""]
        lines += _table(fields)
    for kind in models(Settings.model_fields["algorithm"].annotation):
        lines += ["", f'## [algorithm] with type = "{kind.model_fields["type"].default}"', ""]
        fields = _model_leaves("algorithm", kind)
        if kind is not CustomConfig:
            fields = [
                replace(leaf, default=DEFAULT_EPOCHS) if leaf.path == "algorithm.epochs" else leaf for leaf in fields
            ]
        lines += [_section_text((kind,)), "", *_table(fields)]
    lines += ["", "## Earlier names", ""]
    lines += ["These environment variables are refused, and the error says the new name.", ""]
    lines += ["| before | now |", "|---|---|"]
    lines += [f"| `{name}` | `{variable_name(path)}` |" for name, path in RENAMED.items()]
    return "\n".join(lines) + "\n"


def _table(fields: list[Leaf]) -> list[str]:
    lines = ["| setting | type | default | what it is |", "|---|---|---|---|"]
    for leaf in fields:
        default = _default(leaf)
        cells = [f"`{leaf.path.rpartition('.')[2]}`", _type_name(leaf.annotation)]
        cells += [default if default == UNSET else f"`{default}`", leaf.description]
        lines.append(f"| {' | '.join(cells)} |".replace("\n", " "))
    return lines


def _sections() -> Iterator[tuple[str, list[Leaf]]]:
    """Yield each section with its settings: the top of the file first, and tables within a section after it."""
    by_section: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves(Settings):
        by_section[leaf.path.rpartition(".")[0]].append(leaf)
        kinds = models(leaf.annotation)
        if len(kinds) == 1 and get_origin(leaf.annotation) is not tuple:  # a table that may be absent
            by_section[leaf.path] = _model_leaves(leaf.path, kinds[0])
    order = {name: place for place, name in enumerate(Settings.model_fields)}
    for section in sorted(by_section, key=lambda name: (order.get(name.partition(".")[0], -1), name.count("."))):
        yield section, by_section[section]


def _model_leaves(section: str, model: type[BaseModel]) -> list[Leaf]:
    return [
        Leaf(f"{section}.{name}", field.annotation, _field_default(field), description(model, name))
        for name, field in model.model_fields.items()
    ]


def _field_default(field: FieldInfo) -> object:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _is_optional(section: str) -> bool:
    """Whether a section is a table that may be absent."""
    return any(leaf.path == section for leaf in leaves(Settings))


def _section_text(kinds: tuple[type[BaseModel], ...]) -> str:
    """Return the first paragraph of the docstring of a section."""
    return " ".join((kinds[0].__doc__ or "").split("\n\n")[0].split()) if kinds else ""


def _default(leaf: Leaf) -> str:
    value = leaf.default
    if value is None or str(value).startswith(str(REPOSITORY)):  # a place that depends on the installation
        return UNSET
    if isinstance(value, BaseModel):
        return to_toml({"type": value.type} if hasattr(value, "type") else value.model_dump(mode="json"))
    return to_toml(TypeAdapter(object).dump_python(value, mode="json"))


def _type_name(annotation: object) -> str:
    names = []
    for kind in members(annotation):
        if get_origin(kind) is Literal:
            names.append(", ".join(str(value) for value in get_args(kind)))
        elif (isinstance(kind, type) and issubclass(kind, BaseModel)) or get_origin(kind) is dict:
            names.append("table")
        elif get_origin(kind) in (list, tuple):
            names.append("list")
        else:
            names.append(TYPE_NAMES.get(kind.__name__, kind.__name__) if isinstance(kind, type) else "any")
    return " or ".join(dict.fromkeys(names)).replace("|", "\\|")
