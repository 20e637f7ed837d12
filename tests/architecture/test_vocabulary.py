"""Names use the words of the field."""

from pathlib import Path

from tests.architecture.source_tree import Module
from tests.architecture.vocabulary import defined_names, find_retired_names, find_retired_word, split_words


def test_no_name_contains_a_retired_word() -> None:
    retired = find_retired_names()
    assert not retired, "\n".join(map(str, retired))


def test_names_are_split_at_underscores_and_capitals() -> None:
    assert split_words("_HTTPClient_v2") == ["http", "client", "v", "2"]
    assert split_words("ModelRole") == ["model", "role"]
    assert split_words("MAX_AGE") == ["max", "age"]


def test_only_whole_words_match() -> None:
    assert find_retired_word("DoorBell") == "bell"
    assert find_retired_word("the_hats") == "hat"
    assert (
        find_retired_word("chat") is None
        and find_retired_word("string") is None
        and find_retired_word("ringed") is None
    )


def test_some_words_are_allowed_in_the_names_of_tests() -> None:
    assert find_retired_word("told") == "told" and find_retired_word("kept_rows") == "kept"
    assert find_retired_word("test_client_is_told_why") is None
    assert find_retired_word("test_bell_rings") == "bell"


def test_some_names_are_retired_as_a_whole() -> None:
    assert find_retired_word("Word") == "Word"
    assert find_retired_word("MIN_WORDS") is None and find_retired_word("words") is None


def test_standard_terms_are_allowed() -> None:
    assert find_retired_word("held_out_examples") is None


def test_every_kind_of_definition_is_found(tmp_path: Path) -> None:
    (tmp_path / "bells").mkdir()
    (tmp_path / "bells" / "ring.py").write_text(
        "import json as a\n"
        "class B:\n"
        "    __tablename__ = 'c'\n"
        "    d: int = 0\n"
        "    def e(self, f, *g, h=1, **i):\n"
        "        self.j = k = (yield)\n"
        "        for m, (n, *o) in p: pass\n"
        "        with q() as r: pass\n"
        "@s.command('t')\n"
        "def u(): return lambda v: w(x=v)\n"
    )
    module = Module("bells.ring", Path("bells/ring.py"), tmp_path)
    names = {name for name, _ in defined_names(module)}
    assert names == {"bells", "ring", "__tablename__", "self", *"aBcdefghijkmnortuv"}
