"""Readers return a value with its type, and refuse values of others."""

from collections.abc import Callable

import pytest

from alignment.json_values import as_integer, as_list, as_number, as_object, as_objects, as_text


@pytest.mark.parametrize(
    ("read", "value", "result"),
    [
        (as_object, {"a": 1}, {"a": 1}),
        (as_list, [1, "a"], [1, "a"]),
        (as_objects, [{"a": 1}, {}], [{"a": 1}, {}]),
        (as_text, "a", "a"),
        (as_number, 2, 2.0),
        (as_number, 0.5, 0.5),
        (as_integer, 2, 2),
    ],
)
def test_value_of_the_type_is_returned(read: Callable[[object], object], value: object, result: object) -> None:
    assert read(value) == result


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (as_object, [], "expected an object, found list"),
        (as_list, {}, "expected a list, found dict"),
        (as_objects, [{}, None], "expected an object, found NoneType"),
        (as_text, 1, "expected a text, found int"),
        (as_number, "1", "expected a number, found str"),
        (as_number, True, "expected a number, found bool"),
        (as_integer, 1.0, "expected an integer, found float"),
        (as_integer, False, "expected an integer, found bool"),
    ],
)
def test_value_of_another_type_is_refused(read: Callable[[object], object], value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(value)
