"""An hour of simulated users who press thumbs in the real Open WebUI: `make bench-openwebui`.

A run starts what `attune up` starts, with every setting at its default, in a new folder with SQLite and the embedded
broker, and an Open WebUI of its own (2.9 GB, installed once), set up as docs/connect/openwebui.md says. A judge rates
every reply, whether or not its user votes. Nine of ten replies get a thumb; one in twenty thumbs is pressed wrongly and
changed, three in a hundred are removed again. Open WebUI asks the model for titles, tags and follow-up questions, as
its page does for the first message of a chat.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from app.cli.client import Api, load_api_key
from app.cli.server import LocalDeployment
from app.core.database import Database
from app.core.settings import DEMO_MODEL, Settings
from app.core.settings.loading import load_settings
from app.models import Feedback, Policy, Sample, SampleState, Turn, TurnMetadata, Version
from demo.dialogues import SYSTEM
from tests.benchmarks.deployment import machine
from tests.benchmarks.openwebui_users import OpenWebUIUsers, Pressed, approval_by
from tests.clients.third_party.environments import prepare
from tests.clients.third_party.open_webui_server import run_open_webui
from tests.support.engine_fixture import free_port

POLL_SECONDS = 5.0
SETTLE_SECONDS = 300.0  # for the votes of the last minute to arrive
RECONCILE_SECONDS = 60


@dataclass(frozen=True)
class Recorded:
    """What the service has recorded. `versions`: the version of each reply, by Open WebUI's id of the message."""

    feedback: dict[str, int]
    versions: dict[str, str]
    background: dict[str, int]
    background_samples: int
    trained_samples: int


async def read_recorded(settings: Settings) -> Recorded:
    async with Database(settings.database_url) as db, db.read() as session:
        feedback = await session.execute(
            select(Feedback.kind, func.count()).group_by(Feedback.kind).order_by(Feedback.kind)
        )
        messages = await session.execute(
            select(TurnMetadata.value, Policy.name, Version.number)
            .join(Turn, Turn.id == TurnMetadata.turn_id)
            .join(Version, Version.id == Turn.version_id)
            .join(Policy, Policy.id == Version.policy_id)
            .where(TurnMetadata.key == "message-id", Turn.origin == "chat")
            .order_by(Turn.created_at, Turn.id)
        )
        is_task = Turn.origin == "task"
        background = await session.execute(
            select(Turn.exclusion_reason, func.count())
            .where(is_task)
            .group_by(Turn.exclusion_reason)
            .order_by(Turn.exclusion_reason)
        )
        of_task = select(func.count()).select_from(Sample).join(Turn, Turn.id == Sample.turn_id).where(is_task)
        trained = select(func.count()).select_from(Sample).where(Sample.state == SampleState.TRAINED)
        return Recorded(
            feedback={kind: number for kind, number in feedback},
            versions={message: f"{policy}@v{number}" for message, policy, number in messages},
            background={str(reason): number for reason, number in background},
            background_samples=await session.scalar(of_task) or 0,
            trained_samples=await session.scalar(trained) or 0,
        )


def is_complete(pressed: Pressed, recorded: Recorded) -> bool:
    """Whether every thumb, change and removal has arrived."""
    arrived = recorded.feedback.get("binary", 0), recorded.feedback.get("withdrawal", 0)
    events = pressed.events
    return arrived[0] >= events["pressed"] + events["changed"] and arrived[1] >= events["deleted"]


def chat(running: LocalDeployment, settings: Settings, users: OpenWebUIUsers, number: int, minutes: float) -> Recorded:
    """Let people chat for so many minutes, and return what was recorded when all their votes have arrived."""
    threads, started, num_printed = users.start(number), time.monotonic(), 0
    while time.monotonic() < started + 60 * minutes:
        time.sleep(POLL_SECONDS)
        running.restart_dead_processes()
        recorded = asyncio.run(read_recorded(settings))
        with users.pressed.lock:
            judged = list(users.pressed.judged)
        rows = list(approval_by(recorded.versions, judged))
        for version, replies, approved in rows[num_printed:-1]:
            print(
                f"[{time.monotonic() - started:4.0f} s] {version}: {approved} of {replies} replies approved", flush=True
            )
        num_printed = max(num_printed, len(rows) - 1)
    users.stop()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + SETTLE_SECONDS
    recorded = asyncio.run(read_recorded(settings))
    while not is_complete(users.pressed, recorded) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        recorded = asyncio.run(read_recorded(settings))
    return recorded


def report(settings: Settings, pressed: Pressed, recorded: Recorded) -> str:
    """Return the tables: the approval of each version, and what became of the votes."""
    votes = Api(settings).get(f"/v1/policies/{settings.policy}/votes")
    lines = ["| version | replies | approved |", "|---|---:|---:|"]
    for version, replies, approved in approval_by(recorded.versions, pressed.judged):
        lines.append(f"| {version} | {replies:,} | {approved / replies:.0%} |")
    lines += ["", "| | count |", "|---|---:|"]
    counts = {
        "replies that users read": len(pressed.judged),
        "chats that ended early": pressed.events["failed"],
        "thumbs pressed": pressed.events["pressed"],
        "thumbs changed": pressed.events["changed"],
        "thumbs removed": pressed.events["deleted"],
        **{f"feedback recorded: {kind}": number for kind, number in recorded.feedback.items()},
        "votes learned from": votes["learned"],
        "votes that wait": votes["waiting"],
        **{
            f"votes not learned from: {row['reason']}": row["count"]
            for row in votes["by_reason"]
            if row["state"] == "not_learned"
        },
        "samples trained on": recorded.trained_samples,
        **{f"background replies, {reason}": number for reason, number in recorded.background.items()},
        "background replies that are samples": recorded.background_samples,
    }
    lines += [f"| {name} | {number:,} |" for name, number in counts.items()]
    return "\n".join(lines)


def set_environment(home: str, seed: int) -> None:
    """Set every setting to its default, whatever the shell exports, except for what separates runs."""
    for name in [name for name in os.environ if name.startswith("ATTUNE_") and name != "ATTUNE_TEST_CLIENTS"]:
        del os.environ[name]
    os.environ |= {
        "ATTUNE_HOME": home,
        "ATTUNE_MODEL": str(DEMO_MODEL),
        "ATTUNE_SERVER__PORT": str(free_port()),
        "ATTUNE_ENGINE__PORT": str(free_port()),
        "ATTUNE_TRAINER__SEED": str(seed),
        "OMP_NUM_THREADS": "1",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=8, help="who chat at the same time")
    parser.add_argument("--think-seconds", type=float, default=2.0, help="mean time from a vote to the next message")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    prepare("open_webui")
    print(f"{machine()}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="attune-openwebui-") as folder:
        set_environment(f"{folder}/attune", args.seed)
        settings = load_settings().settings
        page_home = Path(folder) / "open_webui"
        page_home.mkdir()
        with (
            LocalDeployment(settings, lambda message: print(message, file=sys.stderr, flush=True)) as running,
            run_open_webui(page_home) as page,
        ):
            url, key = f"{settings.local_url}/v1", load_api_key(settings)
            page.sign_up()
            page.connect(url, key, settings.policy, system=SYSTEM)
            page.install_plugin(url, key, seconds=RECONCILE_SECONDS)
            users = OpenWebUIUsers(page, settings.policy, str(DEMO_MODEL), args.seed, args.think_seconds)
            recorded = chat(running, settings, users, args.users, args.minutes)
            print(f"\n{report(settings, users.pressed, recorded)}")


if __name__ == "__main__":
    main()
