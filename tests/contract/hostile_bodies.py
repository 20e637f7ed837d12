"""Bodies of a careless or hostile client: valid fields among values that are hard for JSON, Python or SQL."""

import json
from typing import Any

from hypothesis import strategies as st

from tests.contract.harness import COMPLETION_ID

# Valid values by field name, so that a bad field appears in an otherwise valid request.
VALID: dict[str, Any] = {
    "model": "shop",
    "messages": [{"role": "user", "content": "hi"}],
    "input": "hi",
    "completion_id": COMPLETION_ID,
    "kind": "binary",
    "value": True,
    "max_tokens": 4,
    "metadata": {"ticket": "7"},
    "items": [{"completion_id": COMPLETION_ID, "kind": "binary", "value": True}],
    "name": "default",
    "scopes": ["chat"],
}
REQUIRED_FIRST = ("model", "messages", "input", "completion_id", "kind", "value", "items", "name", "scopes")
NOT_JSON = [b"NaN", b"-Infinity", b"1e999", b"01", b"'x'", b'"\x00"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\ud800"']
TOO_DEEP = [b"[" * 65 + b"]" * 65, b"[" * 2000 + b"]" * 2000, b"[" * 50_000, b'{"a":' * 70 + b"1" + b"}" * 70]
UNUSUAL = [
    b'"\\u0000"',
    b'"\\u202e\\uffff"',
    b'""',
    b"null",
    b"true",
    b"-0.0",
    b"1e-400",
    b"1e308",
    b"2147483648",
    b"9223372036854775808",
    b"-" + b"9" * 400,
    b'"' + b"x" * 70_000 + b'"',
    b"[" + b"1," * 5000 + b"1]",
    b'[{}, null, "x", 1]',
    b'{"": {"": []}}',
    b'{"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}, "strict": true}}',
    b'{"type": "function", "function": {"name": "f"}}',
    b'["chat", "admin", "chat"]',
]
anything = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates and NUL included
texts = st.text(max_size=12).filter(lambda text: "\x00" not in text)


def values(strings: st.SearchStrategy[str], numbers: st.SearchStrategy[float]) -> st.SearchStrategy[bytes]:
    tree = st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | strings,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
        max_leaves=8,
    )
    return tree.map(lambda value: json.dumps(value).encode())


wrong_type = values(texts, st.floats(allow_nan=False, allow_infinity=False))
# Mostly valid JSON, so that a case gets past the parser.
hostile = st.one_of(
    wrong_type,
    wrong_type,
    st.sampled_from(UNUSUAL),
    st.sampled_from(UNUSUAL),
    st.sampled_from(NOT_JSON + TOO_DEEP) | values(anything, st.floats()),
)


@st.composite
def bodies(draw: st.DrawFn, fields: tuple[str, ...]) -> bytes:
    """Draw a body. `fields` are the names that the route knows."""
    named = [name for name in fields if name in VALID and (name in REQUIRED_FIRST or draw(st.booleans()))]
    pairs = [(json.dumps(name).encode(), json.dumps(VALID[name]).encode()) for name in named]
    known = st.sampled_from(fields or tuple(VALID))
    names = st.one_of(known, known, known, known, texts).map(json.dumps)
    for name, value in draw(st.lists(st.tuples(names, hostile), max_size=3)):
        key = name.encode()
        if draw(st.integers(0, 3)):  # otherwise the key appears twice
            pairs = [pair for pair in pairs if pair[0] != key]
        pairs.append((key, value))
    body = b"{" + b",".join(key + b":" + value for key, value in draw(st.permutations(pairs))) + b"}"
    return draw(damage(body))


def damage(body: bytes) -> st.SearchStrategy[bytes]:
    unchanged = st.just(body)
    cut = st.integers(0, len(body)).map(lambda at: body[:at])
    inserted = st.tuples(st.integers(0, len(body)), st.binary(min_size=1, max_size=4)).map(
        lambda sampled: body[: sampled[0]] + sampled[1] + body[sampled[0] :]
    )
    other = cut | inserted | hostile | st.binary(max_size=64)
    return st.one_of(unchanged, unchanged, unchanged, unchanged, unchanged, other)
