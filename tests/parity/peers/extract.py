"""Extract statements from a peer's source and run them unchanged, for formulas that are not functions there."""

import ast
import textwrap
from functools import cache
from types import CodeType


@cache
def compile_statements(source: str, first: str, count: int = 1) -> CodeType:
    """Compile `count` statements of `source`, at any depth, from the first one whose text begins with `first`."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list):
                continue
            for index, statement in enumerate(block):
                if ast.unparse(statement).startswith(first):
                    return compile(ast.Module(block[index : index + count], []), "<extracted from a peer>", "exec")
    raise LookupError(f"the peer has no statement that begins with {first!r}")
