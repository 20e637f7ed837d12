"""The tables of contents of the documentation site, which `make docs` builds and whose links it checks."""

import re
from collections import Counter
from pathlib import Path

import pytest

from app.core.settings import REPOSITORY

DOCS = REPOSITORY / "docs"
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)
ANCHOR_LINK = re.compile(r"\]\(([\w/.-]*\.md)?#([\w-]+)\)")
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)
CAPTIONS = ["Tutorials", "How to use it", "How to operate it", "Reference", "Explanation", "Measured"]


def tables_of_contents() -> dict[str, list[str]]:
    """Return the pages of index.md's tables of contents by caption."""
    tables = {}
    for body in TOCTREE.findall((DOCS / "index.md").read_text()):
        options, _, pages = body.partition("\n\n")
        tables[re.findall(r":caption: (.+)", options)[0]] = pages.split()
    return tables


def test_every_page_is_in_one_table_of_contents() -> None:
    listed = Counter(page for pages in tables_of_contents().values() for page in pages)
    paths = [*DOCS.glob("*.md"), *DOCS.glob("connect/*.md")]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in paths} - {"index"}
    missing = sorted(pages - listed.keys())
    assert not missing, f"add these pages to a table of contents of docs/index.md: {missing}"
    assert sorted(listed.elements()) == sorted(pages), "docs/index.md names a page twice, or one that does not exist"


def test_tables_of_contents_are_by_kind_of_page() -> None:
    assert list(tables_of_contents()) == CAPTIONS


def heading_anchors(path: Path) -> set[str]:
    """Return the anchors of the headings that the site gives one, which are also GitHub's."""
    text = FENCE.sub("", path.read_text())
    headings = [re.sub(r"[`*\[\]]|\(.*?\)(?<=\.md\))", "", heading).lower() for heading in HEADING.findall(text)]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", sorted(DOCS.glob("**/*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_links_lead_to_headings(path: Path) -> None:
    wrong = []
    for page, anchor in ANCHOR_LINK.findall(FENCE.sub("", path.read_text())):
        target = (path.parent / page).resolve() if page else path
        if not target.exists() or anchor not in heading_anchors(target):
            wrong.append(f"{page}#{anchor}")
    assert not wrong, f"{path.name} links to headings that do not exist: {wrong}"
