"""Results are cut to a size in bytes, and always valid UTF-8 without NUL."""

from hypothesis import given
from hypothesis import strategies as st

from alignment.environments.tools.result_text import cut_text


def test_head_and_tail_and_what_was_cut() -> None:
    assert cut_text("a" * 50 + "b" * 50, 40) == "aaaaaaaa\n[… 85 bytes cut …]\nbbbbbbb"


def test_short_text_is_unchanged() -> None:
    assert cut_text("a" * 40, 40) == "a" * 40


def test_nul_and_lone_surrogates_are_replaced() -> None:
    text = cut_text("a\x00b\ud800c", 40)
    assert "\x00" not in text and text.startswith("a\ufffdb") and text.endswith("c")
    text.encode()


@given(st.text(st.characters(), max_size=300), st.integers(64, 400))
def test_size_and_mark_hold_for_any_text(text: str, size: int) -> None:
    result = cut_text(text, size)
    assert len(result.encode()) <= size
    assert ("bytes cut" in result) == (len(cut_text(text, 10_000).encode()) > size) or "bytes cut" in text
