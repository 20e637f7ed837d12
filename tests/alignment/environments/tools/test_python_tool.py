"""What the model sees of a program that it ran."""

import pytest

from alignment.environments.errors import InfrastructureFailure
from alignment.environments.sandbox.base import Execution, SandboxLimits, Status
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from alignment.environments.sandbox.unsafe import UnsafeSandbox
from alignment.environments.tools.limits import ToolLimits
from alignment.environments.tools.python_tool import PythonTool, describe_execution
from tests.support.tool_calls import call_one


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (Execution(Status.FINISHED, 0, "a\n", ""), "a"),
        (Execution(Status.FINISHED, 0, "", ""), "(no output)"),
        (Execution(Status.FINISHED, 0, "a\n", "warning\n"), "a\nwarning"),
        (Execution(Status.FINISHED, 1, "a\n", "Traceback\n"), "a\nTraceback"),
        (Execution(Status.FINISHED, 137, "", ""), "Error: the program ended with exit code 137"),
        (Execution(Status.TIMEOUT, None, "a\n", ""), "a\nError: the program was ended after 8 s"),
    ],
)
def test_text_for_the_model(execution: Execution, text: str) -> None:
    assert describe_execution(execution, 8) == text


async def test_program_runs_and_its_errors_are_results() -> None:
    tool = PythonTool(UnsafeSandbox())
    record = await call_one(tool, {"code": "print(2 + 3)"})
    assert (record.fault, record.result.text) == (None, "5")
    assert record.result.metrics == {"is_success": 1, "is_timeout": 0}
    record = await call_one(tool, {"code": "1 / 0"})
    assert record.fault is None and record.result.text.endswith("ZeroDivisionError: division by zero")
    record = await call_one(tool, {"code": 5})
    assert record.result.text == "Error: code: 5 is not of type 'string'"


async def test_time_limit_is_that_of_the_sandbox() -> None:
    """A call that waits for its place is neither cut off nor blamed for it."""
    tool = PythonTool(UnsafeSandbox(SandboxLimits(seconds=1)))
    code = "import time\nwhile True:\n    time.sleep(0.05)"
    record = await call_one(tool, {"code": code}, ToolLimits(call_seconds=0.1))
    assert (record.fault, record.result.text) == (None, "Error: the program was ended after 1 s")
    assert record.result.metrics == {"is_success": 0, "is_timeout": 1}


async def test_missing_sandbox_is_a_failure_of_the_host() -> None:
    with pytest.raises(InfrastructureFailure):
        await call_one(PythonTool(BubblewrapSandbox(program="bwrap-that-is-missing")), {"code": "print(1)"})
