"""What people said, as numbers."""

import pytest

from alignment.rewards import Said, by_source, combine, worth


@pytest.mark.parametrize(("kind", "value"), [("binary", 1.0), ("binary", -1.0), ("score", 0.25), ("rating", -0.5)])
def test_a_preference_is_worth_itself(kind: str, value: float) -> None:
    assert worth(Said("user", kind, value)) == value


@pytest.mark.parametrize(
    ("kind", "value"), [("binary", 0.5), ("score", 1.5), ("rating", -2.0), ("score", float("nan")), ("score", None)]
)
def test_nonsense_is_refused(kind: str, value: float | None) -> None:
    with pytest.raises(ValueError, match=r"is 1 or -1|lies between"):
        worth(Said("user", kind, value))


def test_a_comment_alone_teaches_nothing() -> None:
    assert by_source([Said("user", "comment", 0.0)]) == {}


def test_the_last_word_of_a_source_counts_and_a_comment_behind_it_does_not() -> None:
    heard = [Said("user", "binary", 1.0), Said("user", "score", -0.5), Said("user", "comment", 0.0)]
    assert by_source(heard) == {"user": -0.5}


def test_what_a_source_takes_back_is_gone_until_it_speaks_again() -> None:
    heard = [Said("user", "binary", 1.0), Said("judge", "score", 0.5), Said("user", "withdrawal")]
    assert by_source(heard) == {"judge": 0.5}
    assert by_source([*heard, Said("user", "binary", -1.0)]) == {"user": -1.0, "judge": 0.5}
    assert by_source([Said("user", "withdrawal")]) == {}


def test_sources_are_kept_apart_and_weigh_the_same() -> None:
    rewards = by_source([Said("user", "binary", 1.0), Said("judge", "score", -0.5)])
    assert rewards == {"user": 1.0, "judge": -0.5}
    assert combine(rewards) == 0.25  # (1 − 0.5) / 2
