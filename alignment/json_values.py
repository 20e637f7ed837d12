"""JSON values, and readers for what another program or an earlier one wrote.

A reader returns the value with its type, and raises ValueError for a value of another one.
"""

JsonObject = dict[str, object]  # whose values nobody has looked at; pydantic's JsonValue is for those that are checked


def as_object(value: object) -> JsonObject:
    """Return a JSON object, which is not copied."""
    if not isinstance(value, dict):
        raise _wrong_type(value, "an object")
    return value


def as_list(value: object) -> list[object]:
    """Return a JSON array, which is not copied."""
    if not isinstance(value, list):
        raise _wrong_type(value, "a list")
    return value


def as_objects(value: object) -> list[JsonObject]:
    """Return a JSON array of objects."""
    return [as_object(item) for item in as_list(value)]


def as_text(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong_type(value, "a text")
    return value


def as_number(value: object) -> float:
    """Return an integer or a float as a float. A truth value is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(value, "a number")
    return float(value)


def as_integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(value, "an integer")
    return value


def _wrong_type(value: object, expected: str) -> ValueError:
    return ValueError(f"expected {expected}, found {type(value).__name__}")
