"""An example environment of `verifiers`, for its `load_environment`: multiplication with a tool. Nothing in it is ours.

    python3 -m venv theirs && theirs/bin/pip install verifiers==0.1.14
    cd examples && attune environments run "verifiers:multiply-env?num_rows=100" --python ../theirs/bin/python --group 8

An installed package of verifiers needs no file: its name is enough.
"""

import verifiers
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def load_environment(num_rows: int = 4) -> verifiers.Environment:
    rows = [{"question": f"{number} times 3?", "answer": str(3 * number)} for number in range(num_rows)]

    def exact(completion, answer, **kwargs):  # type: ignore[no-untyped-def]
        return 1.0 if completion[-1]["content"].strip() == answer else 0.0

    rubric = verifiers.Rubric(funcs=[exact])
    return verifiers.ToolEnv(dataset=Dataset.from_list(rows), tools=[multiply], max_turns=3, rubric=rubric)
