"""The tool `python`: runs a program in a sandbox and shows what it printed."""

from alignment.environments.sandbox.base import Execution, Sandbox, Status
from alignment.environments.tools.base import EpisodeContext, JsonObject, Tool, ToolResult

DESCRIPTION = (
    "Run a Python program and return what it prints. Each program runs in a new process, without files of earlier "
    "programs, network or standard input."
)
PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The program. Print what you want to see."}},
    "required": ["code"],
    "additionalProperties": False,
}


class PythonTool(Tool[None]):
    """Runs programs in the sandbox. An error of the program is a result: the model sees its traceback.

    The time limit is the sandbox's: waiting for a free place is not the program's fault.
    """

    has_own_time_limit = True

    def __init__(self, sandbox: Sandbox, *, name: str = "python", description: str = DESCRIPTION) -> None:
        self.name = name
        self.description = description
        self.parameters = PARAMETERS
        self._sandbox = sandbox

    async def create(self, episode: EpisodeContext) -> None:
        return None

    async def execute(self, state: None, arguments: JsonObject) -> ToolResult:
        execution = await self._sandbox.run(str(arguments["code"]))
        metrics = {
            "is_success": float(execution.is_success),
            "is_timeout": float(execution.status is Status.TIMEOUT),
        }
        return ToolResult(describe_execution(execution, self._sandbox.limits.seconds), metrics=metrics)


def describe_execution(execution: Execution, seconds: float) -> str:
    """Return what the program printed, and how it ended if not well."""
    parts = [execution.stdout.rstrip("\n"), execution.stderr.rstrip("\n")]
    if execution.status is Status.TIMEOUT:
        parts.append(f"Error: the program was ended after {seconds:g} s")
    elif not execution.is_success and not execution.stderr.strip():
        parts.append(f"Error: the program ended with exit code {execution.exit_code}")
    return "\n".join(part for part in parts if part) or "(no output)"
