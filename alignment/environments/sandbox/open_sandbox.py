"""Which sandbox runs programs: one typed setting."""

from pathlib import Path
from typing import Literal, Self, assert_never

from pydantic import Field, SecretStr, model_validator

from alignment.config.frozen_model import Frozen
from alignment.environments.sandbox.base import Sandbox, SandboxLimits
from alignment.environments.sandbox.bubblewrap import BubblewrapSandbox
from alignment.environments.sandbox.monty import MontySandbox
from alignment.environments.sandbox.remote import RemoteSandbox
from alignment.environments.sandbox.unsafe import UnsafeSandbox


class SandboxConfig(Frozen):
    """A kind of sandbox with its limits. `unsafe` is none: programs have the rights of this process.

    Example: SandboxConfig(kind="http", url="http://sandbox:8080")
    """

    kind: Literal["bubblewrap", "monty", "http", "unsafe"] = "bubblewrap"
    limits: SandboxLimits = Field(default_factory=SandboxLimits)
    url: str | None = Field(None, description="of the service, for `http`")
    headers: dict[str, SecretStr] = Field(default_factory=dict, description="for `http`, such as a key")
    interpreter: Path | None = Field(None, description="for `bubblewrap`; by default the Python of this process")
    packages: Path | None = Field(None, description="for `bubblewrap`: a folder of `pip install --target`")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "http") != (self.url is not None):
            raise ValueError("`url` belongs to the kind `http`, which needs it")
        if self.kind != "bubblewrap" and (self.interpreter or self.packages):
            raise ValueError("`interpreter` and `packages` belong to the kind `bubblewrap`")
        return self


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the sandbox. What it needs is looked for at its first run, which raises InfrastructureFailure."""
    match config.kind:
        case "bubblewrap":
            return BubblewrapSandbox(config.limits, interpreter=config.interpreter, packages=config.packages)
        case "monty":
            return MontySandbox(config.limits)
        case "http":
            assert config.url is not None
            headers = {name: value.get_secret_value() for name, value in config.headers.items()}
            return RemoteSandbox(config.url, config.limits, headers=headers)
        case "unsafe":
            return UnsafeSandbox(config.limits)
        case _:
            assert_never(config.kind)
