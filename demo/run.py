"""`make demo`: simulated users chat and rate replies on this machine while the policy trains."""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from app.cli.client import Api
from app.cli.console import describe_console
from app.cli.ops import VERSION_COLUMNS, trained_to_served_ms
from app.cli.output import Row, console, format_optional, make_table
from app.cli.server import LocalDeployment
from app.core.database import Database
from app.core.settings import Settings, get_settings
from app.ops.start_checks import check_ports_are_free
from demo.recompute_logprobs import LogprobReport, check_logprobs
from demo.simulate import ClientStats, SimulatedUsers, UserBehavior
from demo.user_preferences import MAX_BRIEF_TOKENS, MIN_BRIEF_TOKENS
from demo.verdict import RunVerdict, judge_run

HOME = Path(".attune/demo")
RECIPE = {
    "ATTUNE_TRAINER__BATCH_SIZE": "96",  # the users vote faster than the trainer learns
    "ATTUNE_ALGORITHM__EPOCHS": "1",
    "ATTUNE_TRAINER__OPTIM__LR": "1.5e-3",  # for a model of 2 M parameters
    "ATTUNE_ALGORITHM__KL_COEF": "0.02",
    "ATTUNE_RATERS__MAX_RATER_SHARE": "0.1",  # a user rates two or three replies, and all users are new
}
MIN_REPLIES = 150  # of the last version, so that its approval is measured well enough
SECONDS_PER_UPDATE = 60  # five times the time of an update on two cores
START_SECONDS = 300  # for the first chats and the last replies, however loaded the machine is
PANELS = (  # metric, label, limits of the axis, color
    ("approval", "approved replies", (0.0, 1.0), "tab:green"),
    ("mean_length", "tokens a reply", (0.0, None), "tab:blue"),
    ("reference_kl", "KL to the base model", (0.0, None), "tab:blue"),
)


async def run_updates(
    deployment: LocalDeployment, settings: Settings, behavior: UserBehavior, updates: int
) -> tuple[ClientStats, list[Row]]:
    """Run the users until `updates` versions have served and the last one has enough replies.

    Returns what the clients received, and the rows of the versions.
    """
    users, api = SimulatedUsers(settings, behavior), Api(settings)
    task = asyncio.create_task(users.run())
    num_printed, started = -1, time.monotonic()
    timeout = SECONDS_PER_UPDATE * updates + START_SECONDS
    try:
        while True:
            await asyncio.sleep(0.5)
            deployment.restart_dead_processes()
            if task.done():
                task.result()
            if time.monotonic() - started > timeout:
                raise TimeoutError(f"{updates} updates did not finish in {timeout:.0f} s; see {settings.logs_dir}")
            rows = await asyncio.to_thread(api.get, f"/v1/policies/{settings.policy}/versions", limit=1000)
            served = [row for row in rows["data"] if row["live_at"] is not None]
            if len(served) - 2 > num_printed:
                num_printed = len(served) - 2
                _print_version(served[num_printed], num_printed, updates, time.monotonic() - started)
            last = next((row for row in served if row["number"] >= updates), None)
            if last is not None and (last["turns"] >= MIN_REPLIES or last is not served[-1]):
                return users.stats, [row for row in rows["data"] if row["number"] <= last["number"]]
    finally:
        users.stop()
        await task


def _print_version(row: Row, number: int, updates: int, seconds: float) -> None:
    approval = format_optional(row["approval"], "{:.0%}")
    milliseconds = trained_to_served_ms(row)
    swap = "" if milliseconds is None else f", trained → served in {milliseconds:.0f} ms"
    console.print(
        f"[{seconds:4.0f} s] {number:2}/{updates} {row['name']}: {row['turns']} replies, approval {approval}, "
        f"{row['mean_length']:.0f} tokens{swap}"
    )


def report(stats: ClientStats, rows: list[Row], logprobs: LogprobReport, verdict: RunVerdict) -> None:
    """Print the versions, the figures, and what the run has shown."""
    console.print(make_table("versions", VERSION_COLUMNS, rows))
    figures = Table(title="figures", show_header=False)
    delays = sorted(row["alignment_delay"] for row in rows if row["alignment_delay"] is not None)
    swaps = sorted(ms for row in rows if (ms := trained_to_served_ms(row)) is not None)
    for name, value in {
        f"approval, v0 → the last {verdict.num_pooled} version(s)": verdict.describe_approval(),
        "last feedback of a batch → first reply by the new version": _format_spread(delays, "s", 1),
        "trained → served": _format_spread(swaps, "ms", 0),
        "replies": str(stats.replies),
        "replies refused, incomplete, mislabelled": f"{stats.refused}, {stats.incomplete}, {stats.mislabelled}",
        "replies whose log-probs do not fit the version they name": f"{logprobs.mislabelled} of {logprobs.replies} "
        f"(largest distance {logprobs.largest_distance:.1e})",
    }.items():
        figures.add_row(name, value)
    console.print(figures)
    for error in stats.errors[:5]:
        console.print(f"error: {error}")
    for line in verdict.sentences:
        console.print(line)


def _format_spread(values: list[float], unit: str, digits: int) -> str:
    if not values:
        return format_optional(None)
    return f"median {values[len(values) // 2]:.{digits}f} {unit}, largest {values[-1]:.{digits}f} {unit}"


def plot(rows: list[Row], path: Path) -> None:
    """Write the learning curve to a PNG: approval, length and KL to the base model, by version."""
    figure = Figure(figsize=(8, 8), layout="constrained")
    all_axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, (name, title, limits, color) in zip(all_axes, PANELS, strict=True):
        points = [(row["number"], row[name] if name in row else row["metrics"].get(name)) for row in rows]
        axes.plot(*zip(*(point for point in points if point[1] is not None), strict=True), marker="o", color=color)
        axes.set_ylabel(title)
        axes.set_ylim(*limits)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    all_axes[1].axhspan(MIN_BRIEF_TOKENS, MAX_BRIEF_TOKENS, color="tab:blue", alpha=0.08)
    all_axes[-1].set_xlabel("version")
    figure.suptitle("Approval, length and KL by version")
    figure.savefig(path, dpi=120)


async def _check_logprobs(settings: Settings) -> LogprobReport:
    async with Database(settings.database_url) as db:
        return await check_logprobs(db, settings)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo ATTUNE_DEMO_FLAGS=…", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop when the result is printed (for CI)")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--users", type=int, default=UserBehavior.users)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = _settings(args.seed)
    shutil.rmtree(HOME, ignore_errors=True)  # the demo starts from an empty deployment
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with LocalDeployment(settings, console.print) as deployment:
        behavior = UserBehavior(users=args.users, seed=args.seed)
        stats, rows = asyncio.run(run_updates(deployment, settings, behavior, args.updates))
        console.print("recomputing every reply under the version it names …")
        logprobs = asyncio.run(_check_logprobs(settings))
        verdict = judge_run(stats, rows, logprobs)
        report(stats, rows, logprobs, verdict)
        plot_path = settings.home.resolve() / "demo.png"
        plot(rows, plot_path)
        console.print(f"plot: {plot_path}")
        if not args.once:
            command = f"ATTUNE_HOME={HOME} {Path(sys.executable).parent}/attune"
            console.print(
                f"The deployment keeps running. In a browser, the run in the {describe_console(settings)}",
                soft_wrap=True,
            )
            console.print("In another terminal:")
            for example in ("console open", "chat", "versions", "rollback", "status"):
                console.print(f"  {command} {example}")
            console.print("ctrl-C stops it.")
            deployment.run()
    sys.exit(1 if verdict.objections else 0)


def _settings(seed: int) -> Settings:
    """Return settings of a separate deployment, whatever the shell exports. Raise SystemExit if a port is taken."""
    for name in ("ATTUNE_DATABASE__URL", "ATTUNE_BROKER__URL", "ATTUNE_API_KEY", "ATTUNE_MODEL"):
        os.environ.pop(name, None)
    os.environ |= {"ATTUNE_HOME": str(HOME), "ATTUNE_TRAINER__SEED": str(seed), "OMP_NUM_THREADS": "1"}
    for name, value in RECIPE.items():
        os.environ.setdefault(name, value)
    settings = get_settings()
    try:
        check_ports_are_free(settings)
    except ValueError as error:
        raise SystemExit(f"make demo: {error}") from error
    return settings


if __name__ == "__main__":
    main()
