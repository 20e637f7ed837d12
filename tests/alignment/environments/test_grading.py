"""Grading: right and wrong programs, and programs that cheat."""

import importlib.util
import shutil
from typing import Any

import pytest

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.grading import (
    MAX_EXPECTED_BYTES,
    CallTest,
    GradingTest,
    ProgramTest,
    grade,
    parse_asserts,
)
from alignment.environments.sandbox.base import Execution, Sandbox, SandboxLimits
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from alignment.environments.sandbox.monty import MontySandbox
from alignment.environments.sandbox.unsafe import UnsafeSandbox
from tests.conftest import skip_or_fail

ADD = parse_asserts("assert add(1, 2) == 3\nassert add(-1, 1) == 0\nassert add([1], [2]) == [1, 2]")


@pytest.fixture(params=["unsafe", "bubblewrap"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "unsafe":
        return UnsafeSandbox()
    if shutil.which("bwrap") is None:
        skip_or_fail("bubblewrap is not installed")
    return BubblewrapSandbox()


async def test_right_and_wrong_programs(sandbox: Sandbox) -> None:
    right = await grade(sandbox, "def add(a, b):\n    print('adding')\n    return a + b", ADD)
    assert (right.reasons, right.is_correct, right.num_passed) == ((None, None, None), True, 3)
    wrong = await grade(sandbox, "def add(a, b):\n    return 3 if a == 1 else a / 0", ADD)
    assert wrong.reasons == (
        None,
        "ZeroDivisionError: division by zero",
        "TypeError: unsupported operand type(s) for /: 'list' and 'int'",
    )
    assert not wrong.is_correct
    assert (await grade(sandbox, "def add(a, b:", ADD)).reasons[0] == "SyntaxError: '(' was never closed"
    assert (await grade(sandbox, "x = 1", ADD)).reasons == ("NameError: name 'add' is not defined",) * 3
    assert not (await grade(sandbox, "x = 1", [])).is_correct, "no tests prove nothing"


CHEATS = {
    "leaves early": "import os\nos._exit(0)",
    "leaves with success": "import sys\nsys.exit(0)",
    "leaves when called": "import os\ndef add(a, b):\n    os._exit(0)",
    "equals everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\n    def __hash__(self):\n        return 0\n"
        "def add(a, b):\n    return Any()"
    ),
    "is a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
        "def add(a, b):\n    return Any(7)"
    ),
    "prints a result": 'import atexit\natexit.register(print, \'[{"value": true}, {"value": 1}, {"value": 1}]\')',
    "replaces the encoder": (
        "def add(a, b):\n    global encode_value\n    encode_value = lambda value: True\n    return None"
    ),
    "replaces JSON": ("import json\njson.dumps = lambda value: '[{}, {}, {}]'\ndef add(a, b):\n    return None"),
    "looks into the frames": (
        "import sys\ndef add(a, b):\n    names = sys._getframe(1).f_globals\n"
        "    return names.get('expected', names.get('tests', 'nothing'))"
    ),
    "reads its source": (
        "import re\ndef add(a, b):\n    found = re.findall(r'== *(\\d)', open(__file__).read())\n"
        "    return int(found[0]) if found else None"
    ),
    "opens a text that swallows the tests": "def add(a, b):\n    return 0\ntext = '''",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_cheats_pass_nothing(sandbox: Sandbox, name: str) -> None:
    """Not even without a sandbox, since what is expected is in no process of the program."""
    assert (await grade(sandbox, CHEATS[name], ADD)).num_passed == 0


async def test_expected_values_never_enter_the_sandbox() -> None:
    class Recording(UnsafeSandbox):
        def __init__(self) -> None:
            super().__init__()
            self.inputs: list[str] = []

        async def run(self, code: str, stdin: str = "", *, output_bytes: int | None = None) -> Execution:
            self.inputs += [code, stdin]
            return await super().run(code, stdin, output_bytes=output_bytes)

    recording = Recording()
    tests: list[GradingTest] = [CallTest("f", (11111,), 987654321), ProgramTest("22222", "987654321")]
    await grade(recording, "def f(x):\n    return x", tests)
    assert len(recording.inputs) == 4
    assert "11111" in recording.inputs[0] and "22222" in recording.inputs[3]
    assert not any("987654321" in text for text in recording.inputs)


async def test_programs_with_input_and_output(sandbox: Sandbox) -> None:
    tests: list[GradingTest] = [ProgramTest("1 2\n", "3"), ProgramTest("2 2\n", "4\n"), ProgramTest("x", "")]
    code = "a, b = input().split()\nprint(int(a) + int(b), '')"
    result = await grade(sandbox, code, tests)
    assert result.reasons == (None, None, "ValueError: not enough values to unpack (expected 2, got 1)")
    assert (await grade(sandbox, "print(3)", tests)).reasons == (None, "wrong output", "wrong output")


async def test_time_out_fails_all_calls() -> None:
    sandbox = UnsafeSandbox(SandboxLimits(seconds=1))
    result = await grade(sandbox, "def add(a, b):\n    while True:\n        pass", ADD)
    assert result.reasons == ("time-out",) * 3


async def test_types_count_and_rounding_does_not(sandbox: Sandbox) -> None:
    async def passes(expression: str, expected: object) -> bool:
        test = CallTest("f", (), expected)  # type: ignore[arg-type]
        return (await grade(sandbox, f"def f():\n    return {expression}", [test])).is_correct

    assert await passes("0.1 + 0.2", 0.3)
    assert await passes("2.0", 2)
    assert await passes("{(1, 2): {3, 'a'}, None: [1.5]}", {None: [1.5], (1, 2): {"a", 3}})
    assert await passes("10 ** 30", 10**30)
    assert await passes("float('inf')", float("inf"))
    assert not await passes("(1, 2)", [1, 2])
    assert not await passes("'1'", 1)
    assert not await passes("None", False)
    assert not await passes("0.1 + 0.2", 0.3001)
    assert not await passes("f", "f")
    assert not await passes("{f}", {"other"})
    assert not await passes("[f]", ["other"])
    assert await passes("{'other'}", {"other"})
    assert not await passes("10 ** 400", 1.5)
    assert not await passes("0", 6.67e-11)
    assert await passes("6.67e-11 * (1 + 1e-12)", 6.67e-11)
    assert await passes("0.1 + 0.2 - 0.3", 0.0)


@pytest.mark.parametrize("expected", [b"secret", 1 + 2j, ..., [b"x"], {"a": (b"x",)}, {(b"x",): 1}, {b"x"}])
def test_expected_values_that_cannot_be_compared_are_refused(expected: Any) -> None:
    with pytest.raises(ValueError, match="cannot be compared: expect text, numbers"):
        CallTest("f", (), expected)
    with pytest.raises(ValueError, match="cannot be compared"):
        parse_asserts(f"assert f() == {expected!r}".replace("Ellipsis", "..."))


PROGRAMS_WITH_NAMES_OF_OTHERS = [
    "list = [1, 2]\nsorted = print = str = isinstance = type = 7\n{}",
    "def encode_value(value):\n    return 0\ndef call(function):\n    return 0\njson = results = arguments = 0\n{}",
    '"""Doc."""\n# Comment\nfrom __future__ import annotations\n\nfrom __future__ import (\n    division,\n)\n{}',
]


@pytest.mark.parametrize("program", PROGRAMS_WITH_NAMES_OF_OTHERS)
async def test_program_may_use_any_name(sandbox: Sandbox, program: str) -> None:
    code = program.format("def f(x, y):\n    return ([1], {2}, {'a': len(y)}, x)")
    test = CallTest("f", (float("inf"), {1, 2}), ([1], {2}, {"a": 2}, float("inf")))
    assert (await grade(sandbox, code, [test])).reasons == (None,)


async def test_long_output_is_compared_whole(sandbox: Sandbox) -> None:
    numbers = list(range(20_000))
    tests: list[GradingTest] = [ProgramTest("", "\n".join(map(str, numbers))), CallTest("f", (), numbers)]
    code = "print(*range({}), sep='\\n')\ndef f():\n    return list(range({}))"
    assert (await grade(sandbox, code.format(20_000, 20_000), tests)).reasons == (None, None)
    assert (await grade(sandbox, code.format(20_001, 19_999), tests)).reasons == ("wrong output", "wrong result")


def test_expected_output_that_is_too_long_is_refused() -> None:
    for make in (lambda: ProgramTest("", "x" * (MAX_EXPECTED_BYTES + 1)), lambda: CallTest("f", (), "é" * (1 << 18))):
        with pytest.raises(ValueError, match="expects more than 1,048,576 bytes"):
            make()
    ProgramTest("", "x" * MAX_EXPECTED_BYTES)


async def test_monty_grades_functions() -> None:
    if importlib.util.find_spec("pydantic_monty") is None:
        skip_or_fail("pydantic-monty is not installed")
    monty = MontySandbox()
    assert (await grade(monty, "def add(a, b):\n    print('adding')\n    return a + b", ADD)).is_correct
    assert (await grade(monty, "list = sorted = print = 0\ndef add(a, b):\n    return a + b", ADD)).is_correct
    assert (await grade(monty, "def add(a, b):\n    return 0", ADD)).reasons == ("wrong result", None, "wrong result")
    await monty.close()


async def test_failure_of_the_sandbox_is_no_grade() -> None:
    with pytest.raises(InfrastructureFailure):
        await grade(BubblewrapSandbox(program="bwrap-that-is-missing"), "def add(a, b):\n    return a + b", ADD)


def test_other_asserts_are_refused() -> None:
    for text in ("assert f(1) > 2", "assert f(x) == 2", "assert m.f(1) == 2", "f(1)", "assert f(a=1) == 2"):
        with pytest.raises(ValueError):
            parse_asserts(text)
    with pytest.raises(ValueError, match="is no name of a function"):
        CallTest("f(); print", (), 1)
