"""What is wrong with settings, as sentences: where a value comes from, what is wrong with it, and what to do."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.core.settings.renamed import RENAMED
from app.core.settings.root import Settings
from app.core.settings.tree import chosen_table, did_you_mean, is_secret, is_url, nearest, variable_name
from app.core.validation_errors import describe, find_place

TYPE_HINT_CUTOFF = 0.6  # a table of one type has few names, so that a less similar one is meant too
# Instead of pydantic's, which name Python's types.
MESSAGES = {
    **dict.fromkeys(("list_type", "tuple_type"), 'it must be a list, e.g. ["one", "two"]'),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"),
        "it must be a table, e.g. {share = 0.05}, in a variable JSON",
    ),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "it must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "it must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "it must be true or false"),
    "path_type": "it must be a path in quotes",
}
# What pydantic converts to a number, or to true and false, unless it is strict. Whole floats such as 1e4 are integers.
CONVERTED: dict[str, tuple[type, ...]] = {
    "int_type": (str, bool),
    "float_type": (str, bool),
    "bool_type": (str, int, float),
}


def find_wrong_types(values: Mapping[str, object], texts: Collection[str] = ()) -> list[ErrorDetails]:
    """Return an error for each value of another type: "24" or true for a number, 1 or "yes" for true.

    Args:
        values: Nested tables, as TOML or JSON has them.
        texts: Paths of values that are text from the environment, which are converted.
    """
    try:
        # As JSON: strict mode then takes lists for tuples and text for paths, and converts nothing else. Dates are no
        # JSON, and no setting: they are refused in any case.
        Settings.model_validate_json(json.dumps(values, default=lambda other: None), strict=True)
    except ValidationError as error:
        found = [each for each in error.errors(include_url=False) if isinstance(each["input"], _converted(each))]
        return [each for each in found if not any(path in texts for path in _prefixes(_path(each)))]
    return []


def _converted(details: ErrorDetails) -> tuple[type, ...]:
    return CONVERTED.get(details["type"], ())


def explain(errors: Sequence[ErrorDetails], sources: Mapping[str, str]) -> list[str]:
    """Return a sentence for each problem. Of several at one place the first counts.

    Args:
        sources: By path, where a value was given.
    """
    first: dict[tuple[str | int, ...], ErrorDetails] = {}
    for details in errors:
        first.setdefault(details["loc"] or (len(first),), details)
    return [_explain(details, sources) for details in first.values()]


def _explain(details: ErrorDetails, sources: Mapping[str, str]) -> str:
    path = _path(details)
    source = next((sources[part] for part in _prefixes(path) if part in sources), None)
    source = source or next((name for other, name in sources.items() if other.startswith(f"{path}.")), None)
    where = f"{source}: " if source else ""
    if details["type"] == "extra_forbidden":
        return _explain_unknown(details, path, where)
    message = MESSAGES.get(details["type"]) or describe(details)
    message = message[0].lower() + message[1:]
    value = details.get("input")
    if isinstance(value, str) and isinstance(value, _converted(details)):
        message += " without quotes"
    is_shown = isinstance(value, str | int | float | bool) and not is_secret(path) and not is_url(path) and path
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{where}{path}{': ' if path else ''}{message}" + (f" (it is {shown})" if is_shown else "")


def _explain_unknown(details: ErrorDetails, path: str, where: str) -> str:
    """Return a sentence about an unknown name. In a table with a `type`, the names of that type are meant."""
    variable, (section, _, name) = variable_name(path), path.rpartition(".")
    if (renamed := RENAMED.get(variable_name(name))) is not None and renamed != path:
        return f"{where}{path} is not a setting; it is {renamed}"
    table = chosen_table(Settings, details["loc"])
    if table is None:
        return f"{where}{path} is not a setting{did_you_mean(nearest(Settings, path))}"
    if any(name in kind.model_fields for kind in table.others):
        return f'{where}{path} does not belong to type = "{details["loc"][-2]}"'
    hints = [f"{section}.{hint}" for hint in nearest(table.model, name, cutoff=TYPE_HINT_CUTOFF)]
    known = "" if hints else f"; known are {', '.join(each for each in table.model.model_fields if each != 'type')}"
    if where == f"{variable}: ":
        return f"{variable} is not a setting{did_you_mean([variable_name(hint) for hint in hints])}{known}"
    return f"{where}{path} is not a setting{did_you_mean(hints)}{known}"


def _path(details: ErrorDetails) -> str:
    return ".".join(map(str, find_place(details, Settings)))


def _prefixes(path: str) -> Iterator[str]:
    """Yield a path, then those of the tables around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
