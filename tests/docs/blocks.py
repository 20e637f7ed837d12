"""Fenced code blocks of the documentation."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.core.settings import REPOSITORY

DOCUMENTS = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").glob("**/*.md")])
BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*")


@dataclass(frozen=True)
class Block:
    """A block with its file, the line of its fence, and its language, which is empty for shell commands and output."""

    file: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(REPOSITORY)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of these languages in all documents."""
    found = []
    for file in DOCUMENTS:
        text = file.read_text()
        for match in BLOCK.finditer(text):
            if match[1] in languages:
                found.append(Block(file, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


def attune_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each `attune` in shell lines, also after a pipe, variables and `;`."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # output, with an apostrophe
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set(";|&()<>"):
                if command and command[0].rpartition("/")[2] == "attune":
                    yield command[1:]
                command = ["a file"] if set(word) <= set("<>") else []  # which follows a redirection
            elif command or not ASSIGNMENT.fullmatch(word):
                command.append(word)
