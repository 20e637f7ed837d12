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
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select

from app.cli.client import Api, load_api_key
from app.cli.server import LocalDeployment
from app.core.database import Database
from app.core.settings import DEMO_MODEL, Settings
from app.core.settings.loading import load_settings
from app.feedback.effective import is_effective
from app.models import Feedback, Policy, Sample, SampleState, Turn, TurnMetadata, Version
from demo.dialogues import SYSTEM
from tests.benchmarks.default_environment import set_default_environment
from tests.benchmarks.deployment import machine
from tests.benchmarks.openwebui_users import OpenWebUIUsers, UserActions, count_approved
from tests.clients.third_party.environments import prepare
from tests.clients.third_party.open_webui_server import run_open_webui

POLL_SECONDS = 5.0
SETTLE_SECONDS = 300.0  # for the votes of the last minute to arrive
RECONCILE_SECONDS = 60


@dataclass(frozen=True)
class Records:
    """What the service has recorded. Replies are named by Open WebUI's id of their message.

    Attributes:
        versions: The version of each reply.
        votes: The thumbs that count, by reply: 1 or -1.
        feedback: How many submissions there are of each kind.
        background: Replies to Open WebUI's own requests, by exclusion reason.
        background_samples: How many of these could be trained on.
        trained_samples: How many replies were trained on.
    """

    versions: dict[str, str]
    votes: dict[str, list[float | None]]
    feedback: dict[str, int]
    background: dict[str, int]
    background_samples: int
    trained_samples: int


async def read_records(settings: Settings) -> Records:
    is_message, is_task = TurnMetadata.key == "message-id", Turn.origin == "task"
    versions = (
        select(TurnMetadata.value, Policy.name, Version.number)
        .join(Turn, Turn.id == TurnMetadata.turn_id)
        .join(Version, Version.id == Turn.version_id)
        .join(Policy, Policy.id == Version.policy_id)
        .where(is_message, Turn.origin == "chat")
        .order_by(Turn.created_at, Turn.id)
    )
    votes = (
        select(TurnMetadata.value, Feedback.value)
        .join(Feedback, Feedback.turn_id == TurnMetadata.turn_id)
        .where(is_message, Feedback.kind == "binary", is_effective())
        .order_by(Feedback.seq, TurnMetadata.turn_id, TurnMetadata.key)
    )
    feedback = select(Feedback.kind, func.count()).group_by(Feedback.kind).order_by(Feedback.kind)
    background = (
        select(Turn.exclusion_reason, func.count())
        .where(is_task)
        .group_by(Turn.exclusion_reason)
        .order_by(Turn.exclusion_reason)
    )
    of_background = select(func.count()).select_from(Sample).join(Turn, Turn.id == Sample.turn_id).where(is_task)
    trained = select(func.count()).select_from(Sample).where(Sample.state == SampleState.TRAINED)
    by_reply: defaultdict[str, list[float | None]] = defaultdict(list)
    async with Database(settings.database_url) as db, db.read() as session:
        for message_id, value in await session.execute(votes):
            by_reply[message_id].append(value)
        return Records(
            versions={id: f"{policy}@v{number}" for id, policy, number in await session.execute(versions)},
            votes=dict(by_reply),
            feedback={kind: number for kind, number in await session.execute(feedback)},
            background={str(reason): number for reason, number in await session.execute(background)},
            background_samples=await session.scalar(of_background) or 0,
            trained_samples=await session.scalar(trained) or 0,
        )


def find_wrong(actions: UserActions, votes: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Return the ids of the replies whose effective thumbs are not exactly the one that the user left, if any."""
    expected = {reply.message_id: [] if reply.vote is None else [reply.vote] for reply in actions.copy_judged()}
    known = (expected.keys() | votes.keys()) - actions.unknown
    return sorted(id for id in known if expected.get(id, []) != list(votes.get(id, ())))


def chat(running: LocalDeployment, settings: Settings, users: OpenWebUIUsers, number: int, minutes: float) -> Records:
    """Let people chat for so many minutes, and return what is recorded when all their votes have arrived."""
    threads, started, num_printed = users.start(number), time.monotonic(), 0
    try:
        while time.monotonic() < started + 60 * minutes:
            time.sleep(POLL_SECONDS)
            running.restart_dead_processes()
            records = asyncio.run(read_records(settings))
            rows = list(count_approved(records.versions, users.actions.copy_judged()))
            for version, replies, approved in rows[num_printed:-1]:
                seconds = time.monotonic() - started
                print(f"[{seconds:4.0f} s] {version}: {approved} of {replies} replies approved", flush=True)
            num_printed = max(num_printed, len(rows) - 1)
    finally:
        users.stop()
        for thread in threads:
            thread.join()
    deadline = time.monotonic() + SETTLE_SECONDS
    records = asyncio.run(read_records(settings))
    while find_wrong(users.actions, records.votes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        records = asyncio.run(read_records(settings))
    return records


def report(settings: Settings, actions: UserActions, records: Records) -> str:
    """Return the tables: the approval of each version, and what became of the votes."""
    votes = Api(settings).get(f"/v1/policies/{settings.policy}/votes")
    lines = ["| version | replies | approved |", "|---|---:|---:|"]
    for version, replies, approved in count_approved(records.versions, actions.judged):
        lines.append(f"| {version} | {replies:,} | {approved / replies:.0%} |")
    lines += ["", "| | count |", "|---|---:|"]
    counts = {
        "replies that users read": len(actions.judged),
        "chats that ended early": actions.events["ended early"],
        **{f"thumbs {event}": actions.events[event] for event in ("pressed", "changed", "removed")},
        "thumbs that count": sum(map(len, records.votes.values())),
        "replies whose thumb is not the last one": len(find_wrong(actions, records.votes)),
        **{f"feedback recorded: {kind}": number for kind, number in records.feedback.items()},
        "votes learned from": votes["learned"],
        "votes that wait": votes["waiting"],
        **{
            f"votes not learned from: {row['reason']}": row["count"]
            for row in votes["by_reason"]
            if row["state"] == "not_learned"
        },
        "samples trained on": records.trained_samples,
        **{f"background replies, {reason}": number for reason, number in records.background.items()},
        "background replies that are samples": records.background_samples,
    }
    lines += [f"| {name} | {number:,} |" for name, number in counts.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=8, help="who chat at the same time")
    parser.add_argument("--think-seconds", type=float, default=2.0, help="mean time from a vote to the next message")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    print(f"{machine()}\n\npreparing Open WebUI, which is installed the first time (2.9 GB)", flush=True)
    prepare("open_webui")
    with tempfile.TemporaryDirectory(prefix="attune-openwebui-") as folder:
        set_default_environment(f"{folder}/attune", DEMO_MODEL, ATTUNE_TRAINER__SEED=str(args.seed))
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
            records = chat(running, settings, users, args.users, args.minutes)
            print(f"\n{report(settings, users.actions, records)}")


if __name__ == "__main__":
    main()
