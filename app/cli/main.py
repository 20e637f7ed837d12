"""The command `attune`."""

import typer

from app.cli import analyze, chat, deployments, ops, policies, server
from app.cli.datasets import exports, imports
from app.cli.deployments import canary, shadow
from app.cli.pins import pins
from app.cli.privacy import subjects
from app.cli.projects import keys, projects
from app.cli.raters import raters
from app.cli.rewards import rewards
from app.cli.rollouts import rollouts
from app.cli.server import database
from app.cli.training import train

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Attune: online preference alignment for chatbots in production."
)
for command in (
    server.up,
    server.serve,
    server.engine,
    server.worker,
    server.beat,
    server.trainer,
    chat.chat,
    ops.status,
    policies.versions,
    deployments.deploy,
    deployments.rollback,
    deployments.delivery,
    analyze.analyze,
    ops.audit,
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)(
    server.simulate
)
for name, group in {
    "canary": canary,
    "shadow": shadow,
    "pin": pins,
    "keys": keys,
    "projects": projects,
    "raters": raters,
    "train": train,
    "rewards": rewards,
    "rollouts": rollouts,
    "subject": subjects,
    "export": exports,
    "import": imports,
    "db": database,
}.items():
    app.add_typer(group, name=name)


def main() -> None:
    try:
        app()
    except (ValueError, TimeoutError) as error:  # errors that the user can correct
        raise SystemExit(f"attune: {error}") from error


if __name__ == "__main__":
    main()
