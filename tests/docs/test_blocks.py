"""Commands, variables, JSON and Python of the documentation: whoever copies them gets no error of a name."""

import json
import re
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from app.cli.main import app
from app.core.settings.loading import OTHER_VARIABLES
from app.core.settings.renamed import RENAMED
from tests.docs.blocks import DOCUMENTS, Block, attune_commands, blocks
from tests.support.settings import is_variable

COMMAND = typer.main.get_command(app)
VARIABLE = re.compile(r"\bATTUNE_[A-Z0-9]\w*\b(?![*<]|_)")
PLACEHOLDER = "…"
# The class of every error of a command line. Typer has it, and does not export it.
UsageError: Any = typer.BadParameter.__mro__[1]


def problem(arguments: list[str]) -> str | None:
    """Return what the command line would say about these arguments, or None. Nothing is run."""
    arguments = [word.strip("[]") for word in arguments if word != PLACEHOLDER]  # [--to 7] is an option to leave out
    command, context = COMMAND, typer.Context(COMMAND, info_name="attune")
    while isinstance(command, TyperGroup):
        if command.invoke_without_command and (not arguments or arguments[0].startswith("-")):
            break  # `attune versions` is a command, and a group
        if not arguments or arguments[0] not in command.commands:
            return None if arguments in ([], ["--help"], ["--version"]) else f"no command {arguments[:1]}"
        name, *arguments = arguments
        command = command.commands[name]
        context = typer.Context(command, parent=context, info_name=name)
    if "--help" in arguments:
        return None
    try:
        command.make_context(context.info_name, arguments, parent=context.parent)
    except UsageError as error:
        message: str = error.format_message()
        return None if PLACEHOLDER in message or "does not exist" in message else message
    return None


@pytest.mark.parametrize("block", blocks("", "bash", "sh", "console"), ids=str)
def test_attune_commands_are_accepted(block: Block) -> None:
    problems = {" ".join(words): found for words in attune_commands(block.text) if (found := problem(words))}
    assert not problems, f"{block}: {problems}"


def test_attune_commands_are_found() -> None:
    found = [words for block in blocks("", "bash") for words in attune_commands(block.text)]
    assert len(found) > 60
    lines = "A=1 B=2 .venv/bin/attune up --port 1 # a comment\ncat x | attune chat -m -; attune status > f\nnot attune"
    assert list(attune_commands(lines)) == [["up", "--port", "1"], ["chat", "-m", "-"], ["status"]]


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["status", "--nonsense"], ["deploy"], ["deploy", "9", "9"], ["up", "--port", "none"]]
)
def test_wrong_commands_are_noticed(arguments: list[str]) -> None:
    assert problem(arguments) is not None


def test_variables_are_settings() -> None:
    unknown = {
        f"{document.name}: {name}"
        for document in DOCUMENTS
        for name in VARIABLE.findall(document.read_text())
        if not is_variable(name) and OTHER_VARIABLES.fullmatch(name) is None
        if document.name != "settings.md" or name not in RENAMED  # it lists what they are called now
    }
    assert not unknown


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_is_valid(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")
