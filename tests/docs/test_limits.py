"""The operators' page of limits: it names settings, defaults and error codes that exist, and all of [limits]."""

import re
from collections.abc import Iterator

import pytest

from app.core.settings import REPOSITORY, Settings
from app.core.settings.tree import Leaf, leaves

PAGE = (REPOSITORY / "docs" / "limits.md").read_text()
SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)`")
ANSWER = re.compile(r"\b([45]\d\d)(?: `(\w+)`)?")
LEAVES = {leaf.path: leaf for leaf in leaves(Settings)}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "h": 3600}
NUMBER = re.compile(r"^([\d,]+)(?: (\w+))?")


def rows() -> Iterator[list[str]]:
    """Yield the cells of the tables' rows: what, setting, default, beyond it, Retry-After."""
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5 and not {"setting", "---"} & set(cells):
            yield cells


ROWS = list(rows())
WITH_NUMBER = [(SETTING.findall(setting), default) for _, setting, default, *_ in ROWS if NUMBER.match(default)]


def test_the_page_has_its_tables() -> None:
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert headings == ["Of the deployment", "Of a project", "Of an API key", "Of a browser token", "Of an address"]
    assert len(ROWS) > 35


def test_named_settings_exist() -> None:
    named = {name for _, setting, *_ in ROWS for name in SETTING.findall(setting)}
    assert len(named) > 20 and not named - LEAVES.keys()


def test_every_setting_of_the_section_limits_is_on_the_page() -> None:
    named = {name for _, setting, *_ in ROWS for name in SETTING.findall(setting)}
    missing = {path for path in LEAVES if path.startswith("limits.")} - named
    assert not missing, f"docs/limits.md must say what a caller sees at: {sorted(missing)}"


@pytest.mark.parametrize(("names", "default"), [one for one in WITH_NUMBER if len(one[0]) == 1], ids=str)
def test_named_defaults_are_those_of_the_settings(names: list[str], default: str) -> None:
    leaf: Leaf = LEAVES[names[0]]
    match = NUMBER.match(default)
    assert match is not None
    assert int(match[1].replace(",", "")) * UNITS.get(match[2], 1) == leaf.default


def test_limits_without_a_default_have_none() -> None:
    without = [SETTING.findall(setting) for _, setting, default, *_ in ROWS if default == "none"]
    assert len(without) == 2 and all(LEAVES[name].default is None for [name] in without)


def test_codes_of_errors_exist() -> None:
    source = "\n".join(path.read_text() for path in (REPOSITORY / "app").rglob("*.py"))
    defined = set(re.findall(r'\bcode(?:: str \| None)? ?= ?"(\w+)"|"(too_many_\w+)"', source))
    codes = {name for pair in defined for name in pair if name}
    named = {code for *_, answer, _ in ROWS for _, code in ANSWER.findall(answer) if code}
    assert len(named) > 15 and not named - codes


def test_every_429_and_503_says_when_to_try_again() -> None:
    for what, _, _, answer, retry_after in ROWS:
        is_temporary = any(status in ("429", "503") for status, _ in ANSWER.findall(answer))
        assert bool(retry_after) == is_temporary, what
