"""Words that must not be used in names, because the field has another word for the same thing.

A name is what the repository defines: a module, a class, a function, a parameter, a variable, a field, a table, or a
command of the command line. Names are split into words at underscores and capitals; a word matches in the singular and
in the plural. Names that are merely used, such as `asyncio.gather`, belong to others and are not checked.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.source_tree import Module, find_modules

SOURCE_FOLDERS = ("app", "alignment", "workers", "demo", "examples", "migrations", "clients/python")
FOLDERS = (*SOURCE_FOLDERS, "tests")

# Retired word → what to write instead.
RETIRED = {
    "attest": "recompute_logprobs, check_logprobs",
    "attested": "recomputed",
    "bell": "TaskSender; enqueue, notification",
    "beside": "shadow_of",
    "curated": "processed",
    "docket": "queue",
    "doorbell": "notification",
    "flaw": "exclusion_reason",
    "furnish": "reconcile, load",
    "hat": "ModelRole",
    "heard": "served; signals, feedback",
    "hears": "receives",
    "house": "project; worker context",
    "journal": "experiment log",
    "knock": "notification",
    "habit": "behavior",
    "ledger": "audit log, rows",
    "lesson": "batch, update, experiment",
    "listening": "policy_config",
    "manner": "reply style",
    "manners": "reply_styles",
    "nudge": "enqueue, notify",
    "nursery": "fork server",
    "obey": "execute",
    "proven": "verified",
    "readout": "comparison",
    "rehearsal": "shadow",
    "rehearse": "run in shadow",
    "rehearsed": "ran in shadow",
    "ring": "training loop",
    "ripe": "ready",
    "shopper": "simulated user",
    "sibling": "group sample",
    "silence": "disable, end",
    "silenced": "disabled",
    "spared": "retried",
    "speaker": "request identity, behavior version, end user",
    "spoke": "sampled, served",
    "spoken": "sampled, served; signals",
    "stain": "taint",
    "station": "worker, stage",
    "sweep": "reconcile, reconciler",
    "sweeper": "reconciler",
    "swept": "reconciled",
    "taught": "trained",
    "taste": "user_preferences",
    "teach": "train",
    "teaching": "reward_model_fits, training",
    "trunk": "base_model",
    "turnstile": "rate limit, semaphore",
    "unheld": "VersionNotLoaded",
    "voice": "rater",
    "wear": "load_adapter, active_role",
    "wearing": "active_role",
    "worn": "loaded",
}

# Words that are retired except in the names of tests, which are clauses. Example: "test_policy_is_kept_on_error".
RETIRED_EXCEPT_IN_TEST_NAMES = {
    "asked": "request, prompt, requested",
    "came": "received",
    "drawn": "sampled",
    "drew": "sampled",
    "given": "arguments, input",
    "kept": "rows, result",
    "liked": "approved",
    "made": "created, result",
    "said": "feedback, message, reply",
    "says": "contains, states",
    "tell": "notify, broadcast",
    "told": "output, message, arguments",
}

# Names that are retired as a whole, because their words have other meanings as well.
RETIRED_NAMES = {
    "Gather": "GroupCommit",
    "Said": "FeedbackCreate",
    "Sheet": "ParquetWriter",
    "Thumb": "BinaryLabel",
    "Whole": "UnaryFanout",
    "Word": "Signal, RatedSample",
    "Words": "PreferenceDataset",
}

REPLACEMENTS = RETIRED | RETIRED_EXCEPT_IN_TEST_NAMES | RETIRED_NAMES

# A name that a standard term of the field contains.
ALLOWED = {
    "connection_made": "the method of asyncio's protocols",
    "held_out": "the part of a data set that is not trained on",
}


@dataclass(frozen=True, order=True)
class RetiredName:
    """A name that contains a retired word."""

    path: str
    line: int
    name: str
    word: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.name}' contains '{self.word}'; write {REPLACEMENTS[self.word]}"


def split_words(name: str) -> list[str]:
    """Split an identifier into lower-case words. Example: "_HTTPClient_v2" -> ["http", "client", "v", "2"]"""
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)]


def find_retired_word(name: str) -> str | None:
    """Return the first retired word of a name, or None."""
    if name in RETIRED_NAMES:
        return name
    if any(term in name.lower() for term in ALLOWED):
        return None
    retired = RETIRED if name.startswith("test_") else RETIRED | RETIRED_EXCEPT_IN_TEST_NAMES
    for word in split_words(name):
        for candidate in (word, word.removesuffix("s")):
            if candidate in retired:
                return candidate
    return None


def defined_names(module: Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines, with their lines."""
    yield from ((part, 1) for part in module.path.with_suffix("").parts)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
            yield from _command_names(node)
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.lineno
        else:
            match node:
                case ast.Assign(targets=[ast.Name(id="__tablename__")], value=ast.Constant(value=str(name))):
                    yield name, node.lineno


def _command_names(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int]]:
    """Yield the name in a decorator such as `@canary.command("abort")`."""
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(func=ast.Attribute(attr="command"), args=[ast.Constant(value=str(name)), *_]):
                yield name, decorator.lineno


def find_retired_names(*folders: str) -> list[RetiredName]:
    """Return the names in these folders, by default in all, that contain a retired word."""
    return sorted(
        {
            RetiredName(str(module.path), line, name, word)
            for module in find_modules(*(folders or FOLDERS))
            for name, line in defined_names(module)
            if (word := find_retired_word(name)) is not None
        }
    )


def main() -> None:
    for retired in find_retired_names():
        print(retired)


if __name__ == "__main__":
    main()
