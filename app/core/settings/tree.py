"""The tree of settings as data: each path with its type, default and description."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

# Leaves whose values are never printed.
SECRET_NAMES = ("api_key", "admin_key", "secrets", "encryption_keys")
URL_NAMES = ("url", "owner_url")  # may contain a password


@dataclass(frozen=True)
class Leaf:
    """A setting that is given one value."""

    path: str
    annotation: object
    default: object
    description: str

    @property
    def variable(self) -> str:
        """The environment variable that overrides it."""
        return variable_name(self.path)


def variable_name(path: str) -> str:
    """Example: "trainer.batch_size" -> "ATTUNE_TRAINER__BATCH_SIZE"."""
    return f"ATTUNE_{path.upper().replace('.', '__')}"


def members(annotation: object) -> tuple[object, ...]:
    """Return the alternatives of a type: those of a union without None, else the type alone."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in members(part) if part is not type(None))
    return (annotation,)


def models(annotation: object) -> tuple[type[BaseModel], ...]:
    """Return the models among the alternatives of a type."""
    return tuple(kind for kind in members(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))


def children(annotation: object) -> dict[str, FieldInfo]:
    """Return the fields of a table by name; of a table with a `type`, those of all types."""
    return {name: field for kind in models(annotation) for name, field in kind.model_fields.items()}


def find(root: object, path: tuple[str, ...]) -> object:
    """Return the type of the value at a path, `object` within free tables, and None where there is no such setting."""
    annotation = root
    for name in path:
        if (field := children(annotation).get(name)) is not None:
            annotation = field.annotation
            continue
        tables = [kind for kind in members(annotation) if get_origin(kind) is dict]
        if not tables and annotation is not object:
            return None
        annotation = get_args(tables[0])[1] if tables else object
    return annotation


def is_text(annotation: object) -> bool:
    """Whether a value of this type is text as it stands in the environment, rather than JSON."""
    return all(
        get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, (str, Path, SecretStr)))
        for kind in members(annotation)
    )


def is_number(annotation: object) -> bool:
    """Whether a value of this type is a number."""
    return all(kind in (int, float) for kind in members(annotation))


def is_typed_table(root: object, path: tuple[str, ...]) -> bool:
    """Whether a path is at or below a table with a `type`, whose names depend on the type."""
    return any(len(models(find(root, path[:length]))) > 1 for length in range(1, len(path) + 1))


class ChosenTable(NamedTuple):
    """A table that a `type` or an index chose, and the tables of the other types."""

    model: type[BaseModel]
    others: tuple[type[BaseModel], ...]


def chosen_table(root: object, loc: tuple[str | int, ...]) -> ChosenTable | None:
    """Return the table that holds the last part of pydantic's path; None where neither type nor index leads to it."""
    annotation, is_chosen = root, False
    others: tuple[type[BaseModel], ...] = ()
    for part in loc[:-1]:
        kinds = models(annotation)
        if len(kinds) > 1:  # the part is the type
            annotation = next(kind for kind in kinds if kind.model_fields["type"].default == part)
            others = tuple(kind for kind in kinds if kind is not annotation)
        else:
            annotation, others = _child(annotation, part), ()
        is_chosen = is_chosen or bool(others) or isinstance(part, int)
    kinds = models(annotation)
    return ChosenTable(kinds[0], others) if is_chosen and len(kinds) == 1 else None


def _child(annotation: object, part: str | int) -> object:
    """Return the type of a value within a value: a field of a table, an item of a list, a value of a free table."""
    if (field := children(annotation).get(str(part))) is not None:
        return field.annotation
    items = [get_args(kind) for kind in members(annotation) if get_origin(kind) in (list, tuple, dict)]
    return items[0][1 if isinstance(part, str) else 0] if items else None


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[Leaf]:
    """Yield every setting below a model in order. A list, a free table and a table that may be absent are one leaf."""
    for name, field in model.model_fields.items():
        path, kinds = f"{prefix}{name}", models(field.annotation)
        if len(kinds) == 1 and not _may_be_none(field.annotation):
            yield from leaves(kinds[0], f"{path}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield Leaf(path, field.annotation, default, description(model, name))


def description(model: type[BaseModel], name: str) -> str:
    """Return what a field is. A field that overrides one of a base class keeps its description, or has its own."""
    fields = (kind.model_fields.get(name) for kind in model.__mro__ if issubclass(kind, BaseModel))
    return next((field.description for field in fields if field is not None and field.description), "")


def _may_be_none(annotation: object) -> bool:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return type(None) in get_args(annotation)


def nearest(root: type[BaseModel], path: str, cutoff: float = 0.8) -> list[str]:
    """Return the settings that were probably meant by an unknown path, at most three.

    `cutoff` is the similarity, from 0 to 1, from which on a name is meant.
    """
    known = [*_paths(root)]
    section, _, name = path.rpartition(".")
    same_name = [other for other in known if other.rpartition(".")[2] == name]
    if within_section := [other for other in same_name if section and other.startswith(f"{section}.")]:
        return within_section[:3]
    if same_name and len(same_name) <= 3:
        return same_name
    if matches := get_close_matches(path, known, n=1, cutoff=0.75):
        return matches
    by_name = {other.rpartition(".")[2]: other for other in known}
    return [by_name[match] for match in get_close_matches(name, by_name, n=1, cutoff=cutoff)]


def did_you_mean(hints: list[str]) -> str:
    """Return the end of a sentence about an unknown name; "" without hints."""
    return f"; did you mean {' or '.join(hints)}?" if hints else ""


def _paths(annotation: object, prefix: str = "") -> Iterator[str]:
    for name, field in children(annotation).items():
        yield f"{prefix}{name}"
        yield from _paths(field.annotation, f"{prefix}{name}.")


def is_secret(path: str) -> bool:
    return any(name in SECRET_NAMES for name in path.split("."))


def is_url(path: str) -> bool:
    """Whether the value is a URL that may contain a password."""
    return path.rpartition(".")[2] in URL_NAMES


def printable(path: str, value: object) -> object:
    """Return a value without secrets: keys are hidden, and so are the passwords in URLs."""
    if is_secret(path):
        if isinstance(value, dict):
            return dict.fromkeys(value, "***")
        if isinstance(value, (list, tuple)):
            return ["***"] * len(value)
        return None if value is None else "***"
    if isinstance(value, SecretStr):
        return "***"
    if is_url(path) and isinstance(value, str) and "@" in value:
        scheme, separator, rest = value.partition("://")
        return f"{scheme}{separator}***@{rest.rpartition('@')[2]}"
    return value
