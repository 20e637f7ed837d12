"""`make demo`: the whole ring on this machine: a crowd chats and judges, the service learns, the result is shown."""

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from app.cli.client import Api
from app.cli.output import console, swap_ms, versions
from app.cli.up import Up, refuse_taken_ports
from app.core.database import Database
from app.core.settings import Settings, get_settings
from demo.plot import plot
from demo.recompute_logprobs import Attestation, attest
from demo.simulate import Crowd, Habits, Tally

HOME = Path(".attune/demo")
RECIPE = {
    "ATTUNE_LEARNING_RATE": "1.5e-3",  # for a model of 2 M parameters
    "ATTUNE_KL_COEF": "0.02",
    "ATTUNE_MAX_RATER_SHARE": "0.1",  # a shopper is heard two or three times, and nobody knows them
}
ENOUGH_REPLIES = 150  # of the last version, before its approval is called measured
SECONDS_AN_UPDATE = 60  # five times what one takes on two cores
BEFORE, AFTER = 0.45, 0.85


async def learn(running: Up, settings: Settings, habits: Habits, updates: int) -> tuple[Tally, list[dict[str, Any]]]:
    """Let the crowd chat until `updates` versions have served and the last has been heard enough."""
    crowd, api = Crowd(settings, habits), Api(settings)
    task = asyncio.create_task(crowd.run())
    told, started = -1, time.monotonic()
    patience = SECONDS_AN_UPDATE * (updates + 2)
    try:
        while True:
            await asyncio.sleep(0.5)
            running.watch()
            if task.done():
                task.result()
            if time.monotonic() - started > patience:
                raise TimeoutError(f"{updates} updates did not come in {patience:.0f} s; see {settings.logs_dir}")
            rows = await asyncio.to_thread(api.get, f"/v1/policies/{settings.policy}/versions")
            served = [row for row in rows["data"] if row["live_at"] is not None]
            if len(served) - 2 > told:
                told = len(served) - 2
                _tell(served[told], told, updates, time.monotonic() - started)
            last = next((row for row in served if row["number"] >= updates), None)
            if last is not None and (last["turns"] >= ENOUGH_REPLIES or last is not served[-1]):
                return crowd.tally, [row for row in rows["data"] if row["number"] <= last["number"]]
    finally:
        crowd.stop()
        await task


def _tell(row: dict[str, Any], number: int, updates: int, seconds: float) -> None:
    approval = "–" if row["approval"] is None else f"{row['approval']:.0%}"
    swap = "" if swap_ms(row) is None else f", trained → served in {swap_ms(row):.0f} ms"
    console.print(
        f"[{seconds:4.0f} s] {number:2}/{updates} {row['name']}: {row['turns']} replies, approval {approval}, "
        f"{row['mean_length']:.0f} tokens{swap}"
    )


def report(tally: Tally, rows: list[dict[str, Any]], attested: Attestation) -> bool:
    """The table, the figures, and whether the demo showed what it promises."""
    console.print(versions(rows))
    first, last = rows[0]["approval"], rows[-1]["approval"]
    figures = Table(title="figures", show_header=False)
    delays = sorted(row["alignment_delay"] for row in rows if row["alignment_delay"] is not None)
    swaps = sorted(ms for row in rows if (ms := swap_ms(row)) is not None)
    for name, value in {
        "approval, first → last version": f"{first:.0%} → {last:.0%}",
        "last feedback of a batch → first reply by the new version": _spread(delays, "s", 1),
        "trained → served": _spread(swaps, "ms", 0),
        "replies": str(tally.replies),
        "refused, cut, mislabelled (as the users saw it)": f"{tally.refused}, {tally.cut}, {tally.mislabelled}",
        "replies whose log-probs do not fit the version they name": f"{attested.mislabelled} of {attested.replies} "
        f"(largest distance {attested.largest_distance:.1e})",
    }.items():
        figures.add_row(name, value)
    console.print(figures)
    for trouble in tally.troubles[:5]:
        console.print(f"trouble: {trouble}")
    unhurt = not (tally.refused or tally.cut or tally.mislabelled or attested.mislabelled)
    return first < BEFORE and last > AFTER and unhurt


def _spread(values: list[float], unit: str, digits: int) -> str:
    return f"median {values[len(values) // 2]:.{digits}f} {unit}, largest {values[-1]:.{digits}f} {unit}"


async def _attest(settings: Settings) -> Attestation:
    db = Database(settings.database)
    try:
        return await attest(db, settings)
    finally:
        await db.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo ATTUNE_DEMO_FLAGS=…", description=__doc__)
    parser.add_argument("--once", action="store_true", help="end when the result is shown (for CI)")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--users", type=int, default=Habits.users)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    settings = _settings(asked.seed)
    shutil.rmtree(HOME, ignore_errors=True)  # a demo starts from the beginning
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with Up(settings, console.print) as running:
        tally, rows = asyncio.run(learn(running, settings, Habits(users=asked.users, seed=asked.seed), asked.updates))
        console.print("recomputing every reply under the version it names …")
        good = report(tally, rows, asyncio.run(_attest(settings)))
        picture = settings.home.resolve() / "demo.png"
        plot(rows, picture)
        console.print(f"plot: {picture}")
        if not asked.once:
            _leave_up(running)
    if not good:
        console.print(f"this run did not show what it should: under {BEFORE:.0%} to over {AFTER:.0%}, nobody hurt")
    sys.exit(0 if good else 1)


def _settings(seed: int) -> Settings:
    """A deployment of the demo's own, whatever the shell exports for another. Raises SystemExit if one is up."""
    for name in ("ATTUNE_DATABASE_URL", "ATTUNE_BROKER_URL", "ATTUNE_API_KEY", "ATTUNE_MODEL"):
        os.environ.pop(name, None)
    os.environ |= {"ATTUNE_HOME": str(HOME), "ATTUNE_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    for name, value in RECIPE.items():
        os.environ.setdefault(name, value)
    settings = get_settings()
    try:
        refuse_taken_ports(settings)
    except ValueError as error:
        raise SystemExit(f"make demo: {error}") from error
    return settings


def _leave_up(running: Up) -> None:
    command = f"ATTUNE_HOME={HOME} {Path(sys.executable).parent}/attune"
    console.print("It is yours now. In another terminal:")
    for example in ("chat", "versions", "rollback", "status"):
        console.print(f"  {command} {example}")
    console.print("ctrl-C stops it.")
    try:
        while True:
            running.watch()
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
