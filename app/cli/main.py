"""The command `attune`."""

import typer

from app.cli import analyze, chat, data, deployments, feedback, ops, projects, server, training

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
    "audit": ops.audits,
    "canary": deployments.canary,
    "shadow": deployments.shadow,
    "pin": deployments.pins,
    "keys": projects.keys,
    "projects": projects.projects,
    "raters": projects.raters,
    "feedback": feedback.feedback,
    "train": training.train,
    "rewards": training.rewards,
    "rollouts": training.rollouts,
    "subject": data.subjects,
    "export": data.exports,
    "import": data.imports,
    "db": server.database,
}.items():
    app.add_typer(group, name=name)


def main() -> None:
    try:
        app()
    except (ValueError, TimeoutError) as error:  # errors that the user can correct
        raise SystemExit(f"attune: {error}") from error


if __name__ == "__main__":
    main()
