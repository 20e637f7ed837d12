"""The command `attune`."""

from importlib.metadata import packages_distributions, version
from typing import Annotated

import typer

from app.cli import (
    analyze,
    backup,
    chat,
    config,
    console,
    data,
    deployments,
    doctor,
    environments,
    episodes,
    feedback,
    local_service,
    ops,
    plan,
    policies,
    projects,
    retention,
    server,
    training,
    webhooks,
)
from app.core.migrate import newest_revision

app = typer.Typer(no_args_is_help=True)


def _print_version(requested: bool) -> None:
    if requested:
        [distribution, *_] = packages_distributions()["app"]
        typer.echo(f"{distribution} {version(distribution)}, schema {newest_revision()}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Attune: online preference alignment for chatbots in production."""


for command in (
    server.up,
    server.serve,
    server.engine,
    server.worker,
    server.beat,
    server.trainer,
    local_service.stop,
    local_service.logs,
    doctor.doctor,
    plan.plan,
    chat.chat,
    ops.status,
    ops.versions,
    deployments.deploy,
    deployments.rollback,
    deployments.delivery,
    analyze.analyze,
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)(
    server.simulate
)
for name, group in {
    "config": config.config,
    "console": console.console,
    "policies": policies.policies,
    "audit": ops.audits,
    "versions": ops.version_commands,
    "canary": deployments.canary,
    "shadow": deployments.shadow,
    "pin": deployments.pins,
    "keys": projects.keys,
    "projects": projects.projects,
    "raters": projects.raters,
    "feedback": feedback.feedback,
    "environments": environments.environments,
    "episodes": episodes.episodes,
    "train": training.train,
    "rewards": training.rewards,
    "rollouts": training.rollouts,
    "subject": data.subjects,
    "export": data.exports,
    "import": data.imports,
    "db": server.database,
    "backup": backup.backups,
    "webhooks": webhooks.webhooks,
    "retention": retention.retention,
}.items():
    app.add_typer(group, name=name)


def main() -> None:
    try:
        app()
    except (ValueError, TimeoutError) as error:  # errors that the user can correct
        raise SystemExit(f"attune: {error}") from error


if __name__ == "__main__":
    main()
