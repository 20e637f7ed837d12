"""Grade a program that a model wrote by tests, in processes that the model has never touched.

The program gets the inputs of a test, never what is expected: results are compared here, outside of the sandbox. So a
program that looks for references, leaves early, changes `assert` or returns an object that equals everything gains
nothing; all it can do is to compute the answer.

Each grading runs in fresh processes, apart from those of the tool `python`: nothing that the model has left behind in
an episode is there.

Example:
    tests = [*parse_asserts("assert add(1, 2) == 3"), ProgramTest(stdin="1 2\\n", stdout="3\\n")]
    result = await grade(sandbox, code, tests)
    reward = 1.0 if result.is_correct else -1.0
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import getsource
from textwrap import indent

from pydantic import JsonValue

from alignment.environments.encoded_values import PlainValue, encode_value, is_plain
from alignment.environments.sandbox.base import Execution, Sandbox, Status

RELATIVE_TOLERANCE = 1e-9  # of floating point numbers
ZERO_TOLERANCE = 1e-12  # where 0 is expected, which nothing is relatively close to
MAX_REASON_CHARS = 200
MAX_EXPECTED_BYTES = 1 << 20  # of what a test expects, as it is printed
# Comments, the module's docstring and `from __future__` imports, which nothing may be put before.
PRELUDE = re.compile(
    r"(?:[ \t]*(?:#.*)?\n|\"\"\"[\s\S]*?\"\"\".*\n|'''[\s\S]*?'''.*\n|from __future__ import (?:\([^)]*\).*|.*)\n)*+"
)
# Names that the program may define anew: they are bound before it runs.
BUILTINS = (
    *("BaseException", "bool", "dict", "float", "frozenset", "int", "isinstance", "list", "object", "print", "set"),
    *("sorted", "str", "tuple", "type"),
)


@dataclass(frozen=True)
class ProgramTest:
    """The program is run with this standard input and must print this. Spaces at the ends of lines do not count."""

    stdin: str
    stdout: str

    def __post_init__(self) -> None:
        _check_size(self.stdout)


@dataclass(frozen=True)
class CallTest:
    """A function of the program is called with these arguments and must return this."""

    function: str
    arguments: tuple[PlainValue, ...]
    expected: PlainValue

    def __post_init__(self) -> None:
        if not self.function.isidentifier():
            raise ValueError(f"{self.function!r} is no name of a function")
        if not is_plain(self.expected):
            raise ValueError(
                f"{self.expected!r:.200} cannot be compared: expect text, numbers, None, or lists, tuples, sets and "
                "dictionaries of them, such as the hex digits of bytes"
            )
        _check_size(json.dumps(encode_value(self.expected)))


def _check_size(expected: str) -> None:
    if len(expected.encode("utf-8", "replace")) > MAX_EXPECTED_BYTES:
        raise ValueError(f"a test expects more than {MAX_EXPECTED_BYTES:,} bytes: use a shorter one")


GradingTest = ProgramTest | CallTest


@dataclass(frozen=True)
class Grade:
    """Why each test failed, None for one that passed. Reasons name no expected value."""

    reasons: tuple[str | None, ...]

    @property
    def num_passed(self) -> int:
        return self.reasons.count(None)

    @property
    def is_correct(self) -> bool:
        """Whether all tests have passed: a share of them is often had without solving the task."""
        return bool(self.reasons) and self.num_passed == len(self.reasons)


def parse_asserts(text: str) -> list[CallTest]:
    """Return the tests of lines such as `assert f(1, [2]) == 3`, as in MBPP. Raises ValueError for other statements."""
    tests = []
    for statement in ast.parse(text).body:
        match statement:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]),
                    ops=[ast.Eq()],
                    comparators=[value],
                )
            ):
                values = tuple(ast.literal_eval(argument) for argument in arguments)
                tests.append(CallTest(name, values, ast.literal_eval(value)))
            case _:
                raise ValueError(f"not of the form `assert f(…) == …`: {ast.unparse(statement)}")
    return tests


async def grade(sandbox: Sandbox, code: str, tests: Sequence[GradingTest]) -> Grade:
    """Return which tests the program passes. All calls are made in one process, each other test has its own.

    Raises InfrastructureFailure if the sandbox fails, which says nothing about the program.
    """
    calls = [test for test in tests if isinstance(test, CallTest)]
    call_reasons = iter(await _grade_calls(sandbox, code, calls) if calls else ())
    reasons = [
        next(call_reasons) if isinstance(test, CallTest) else await _grade_program(sandbox, code, test)
        for test in tests
    ]
    return Grade(tuple(reasons))


async def _grade_program(sandbox: Sandbox, code: str, test: ProgramTest) -> str | None:
    execution = await sandbox.run(code, test.stdin, output_bytes=_output_bytes(sandbox, test.stdout))
    if not execution.is_success:
        return _describe_failure(execution)
    return None if _lines(execution.stdout) == _lines(test.stdout) else "wrong output"


def _output_bytes(sandbox: Sandbox, expected: str) -> int:
    """Return a limit from which nothing of an output as long as the expected one is cut.

    Only the tail, a half, is sure to hold the results; and numbers of the same value may be longer (1, 1.0000000001).
    """
    return sandbox.limits.output_bytes + 4 * len(expected.encode("utf-8", "replace"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _grade_calls(sandbox: Sandbox, code: str, calls: Sequence[CallTest]) -> list[str | None]:
    expected = json.dumps([{"value": encode_value(call.expected)} for call in calls])
    execution = await sandbox.run(_program(code, calls), output_bytes=_output_bytes(sandbox, expected))
    results = _read_results(execution.stdout)
    if len(results) != len(calls):
        return [_describe_failure(execution)] * len(calls)
    return [_compare(result, call) for result, call in zip(results, calls, strict=True)]


def _program(code: str, calls: Sequence[CallTest]) -> str:
    """Return the program with calls at its end. It prints on its last line what each returned or raised.

    What the calls need is defined before the program, in a scope of its own, since a program may well have a `list` or
    an `encode_value` itself.
    """
    prelude = PRELUDE.match(code)
    split = prelude.end() if prelude else 0
    lines = [
        f"_attune_call(lambda *arguments: {call.function}(*arguments), {number})" for number, call in enumerate(calls)
    ]
    return "\n".join([code[:split] + _driver(calls), code[split:], "", *lines, "_attune_finish()"])


def _driver(calls: Sequence[CallTest]) -> str:
    body = [
        "import json",
        "dumps = json.dumps",
        "inf, nan, results = float('inf'), float('nan'), []",
        f"arguments = {[call.arguments for call in calls]!r}",
        getsource(encode_value),
        "def call(function, number):",
        "    try:",
        "        results.append({'value': encode_value(function(*arguments[number]))})",
        "    except BaseException as error:",
        f"        results.append({{'error': (type(error).__name__ + ': ' + str(error))[:{MAX_REASON_CHARS}]}})",
        "def finish():",
        "    print('\\n' + dumps(results))",
        "return call, finish",
    ]
    return "\n".join(
        [
            f"def _attune_driver({', '.join(f'{name}={name}' for name in BUILTINS)}):",
            indent("\n".join(body), "    "),
            "_attune_call, _attune_finish = _attune_driver()",
        ]
    )


def _read_results(stdout: str) -> list[JsonValue]:
    """Return the results on the last line; none if there is no such line."""
    lines = stdout.rstrip("\n").splitlines()
    try:
        results = json.loads(lines[-1]) if lines else []
    except (ValueError, RecursionError):
        return []
    return results if isinstance(results, list) else []


def _compare(result: JsonValue, call: CallTest) -> str | None:
    if isinstance(result, Mapping) and "value" in result:
        return None if _are_equal(result["value"], encode_value(call.expected)) else "wrong result"
    error = result.get("error") if isinstance(result, Mapping) else None
    return str(error)[:MAX_REASON_CHARS] if error else "no result"


def _are_equal(actual: object, expected: object) -> bool:
    """Compare encoded values. Numbers may differ by rounding."""
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        if isinstance(actual, float) or isinstance(expected, float):
            return _are_close(actual, expected)
        return actual == expected
    if isinstance(actual, list) and isinstance(expected, list):
        if expected == ["other"]:
            return False  # what is no plain value is equal to nothing
        return len(actual) == len(expected) and all(map(_are_equal, actual, expected))
    return type(actual) is type(expected) and actual == expected


def _are_close(actual: float, expected: float) -> bool:
    tolerance = 0.0 if expected else ZERO_TOLERANCE
    try:
        return math.isclose(actual, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=tolerance)
    except OverflowError:  # an integer that is larger than any floating point number
        return False


def _describe_failure(execution: Execution) -> str:
    """Example: "ZeroDivisionError: division by zero" """
    if execution.status is Status.TIMEOUT:
        return "time-out"
    lines = execution.stderr.strip().splitlines()
    return lines[-1][:MAX_REASON_CHARS] if lines else f"no result, exit code {execution.exit_code}"
