"""An example environment: a coding agent completes functions, and hidden tests grade them in a sandbox.

    attune environments run examples.coding_agent:CodingAgent --tasks 4 --group 8 --max-turns 6

The agent may try programs with the tool `python`. Its first reply without a call is the answer, which is graded in a
new process: nothing that the tool has run is there, and no process has what the tests expect. If the sandbox fails,
the attempt ends as `infrastructure`, and nothing is learned from it. The sandbox is bubblewrap, or another one that
`--arguments` names, such as '{"sandbox": "monty"}'.
"""

import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.grading import CallTest, grade, parse_asserts
from alignment.environments.protocols import Feedback, Interaction, Message, Observation, Task
from alignment.environments.sandbox.base import Sandbox
from alignment.environments.sandbox.open_sandbox import SandboxConfig, open_sandbox
from alignment.environments.tools.python_tool import PythonTool
from alignment.environments.tools.toolbox import Toolbox
from alignment.environments.worlds import InteractionWorld

PROMPT = """Complete this Python function. You can try programs with the tool `python`.
Then answer with the whole function in a block that begins with ```python.

{stub}"""
BLOCK = re.compile(r"```[^`\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Function(NamedTuple):
    """A function to complete, and its hidden tests. They expect different results, so that no constant passes many."""

    signature: str
    docstring: str
    tests: str

    @property
    def stub(self) -> str:
        return f'def {self.signature}:\n    """{self.docstring}"""\n'


TRAIN = (
    Function(
        "leap_years(first: int, last: int) -> list[int]",
        "Return the years from first to last, both included, that have 366 days in the Gregorian calendar.",
        """assert leap_years(1996, 2004) == [1996, 2000, 2004]; assert leap_years(1897, 1905) == [1904]
assert leap_years(2024, 2024) == [2024]; assert leap_years(2001, 2003) == []""",
    ),
    Function(
        "count_vowels(text: str) -> int",
        "Return how many of its letters are a, e, i, o or u, small or capital.",
        """assert count_vowels('banana') == 3; assert count_vowels('rhythm') == 0
assert count_vowels('AEiOU') == 5; assert count_vowels('Queue 1') == 4""",
    ),
    Function(
        "run_lengths(text: str) -> list[tuple[str, int]]",
        "Return each run of equal letters with its length: 'aab' has [('a', 2), ('b', 1)].",
        """assert run_lengths('aaabcc') == [('a', 3), ('b', 1), ('c', 2)]; assert run_lengths('') == []
assert run_lengths('zz') == [('z', 2)]; assert run_lengths('aba') == [('a', 1), ('b', 1), ('a', 1)]""",
    ),
    Function(
        "second_largest(numbers: list[int]) -> int | None",
        "Return the second largest of the different numbers, or None.",
        """assert second_largest([3, 1, 2]) == 2; assert second_largest([5, 5, 4]) == 4
assert second_largest([7, 7]) == None; assert second_largest([-1, -2, -3]) == -2""",
    ),
)
TEST = (
    Function(
        "roman(number: int) -> str",
        "Return a number from 1 to 3999 in Roman numerals.",
        """assert roman(3) == 'III'; assert roman(9) == 'IX'
assert roman(40) == 'XL'; assert roman(1994) == 'MCMXCIV'""",
    ),
)


class CodingAgent(LoopEnvironment):
    """The environment. All attempts share a sandbox, so that few programs run at a time, and the others wait."""

    def __init__(self, sandbox: str = "bubblewrap", seconds: float = 8.0) -> None:
        limits = {"seconds": seconds}  # of a program
        self._sandbox = open_sandbox(SandboxConfig.model_validate({"kind": sandbox, "limits": limits}))
        super().__init__(lambda: InteractionWorld(FunctionTask(self._sandbox)))

    async def close(self) -> None:
        await super().close()
        await self._sandbox.close()


class FunctionTask(Interaction):
    """One attempt at one function. Its score is the share of the tests that the answer passes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._tests: list[CallTest] = []
        self._code = ""  # of an attempt that a limit ends before there is an answer

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        functions = TRAIN if split == "train" else TEST
        for function in Random(seed).sample(functions, len(functions)):
            yield Task(function.signature.partition("(")[0], {"stub": function.stub, "tests": function.tests})

    async def start(self, task: Task) -> Observation:
        self._tests = parse_asserts(str(task.data["tests"]))
        prompt = PROMPT.format(stub=task.data["stub"])
        return Observation([{"role": "user", "content": prompt}], toolbox=Toolbox([PythonTool(self._sandbox)]))

    async def respond(self, messages: Sequence[Message]) -> Feedback:
        answer = str(messages[-1].get("content"))
        self._code = find_code(answer, self._tests[0].function)
        return Feedback({"role": "user", "content": "Thank you."}, is_done=True)

    async def score(self) -> float:
        """Grade the answer. Whatever it does, it fails tests; only a failure of the sandbox is raised."""
        return (await grade(self._sandbox, self._code, self._tests)).num_passed / len(self._tests)


def find_code(answer: str, function: str) -> str:
    """Return the last block that defines the function, since an example of its use may follow; or else the last block,
    or the whole answer."""
    blocks: list[str] = BLOCK.findall(answer)
    defining = [block for block in blocks if re.search(rf"\bdef {function}\b", block)]
    return (defining or blocks or [answer])[-1]
