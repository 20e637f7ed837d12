"""Statements out of the middle of a peer's source, run as they stand: for formulas that are no functions there."""

import ast
import textwrap
from functools import cache
from types import CodeType


@cache
def cut(source: str, first: str, count: int = 1) -> CodeType:
    """`count` statements from the one whose text begins with `first`, from whatever depth of `source`."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for at, statement in enumerate(block if isinstance(block, list) else ()):
                if ast.unparse(statement).startswith(first):
                    return compile(ast.Module(block[at : at + count], []), "<cut out of a peer>", "exec")
    raise LookupError(f"the peer has no statement that begins with {first!r}")
