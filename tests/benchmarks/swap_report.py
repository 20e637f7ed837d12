"""What `make bench-swap` prints: the milliseconds of each phase, and what became of the users' replies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import func, select

from app.core.database import Database
from app.models import Audit, Engine, Origin, Turn, TurnState, Version
from demo.recompute_logprobs import check_logprobs
from tests.benchmarks.deployment import POLICY
from tests.benchmarks.load import quantile
from tests.benchmarks.swap_deployment import SwapDeployment
from tests.benchmarks.swap_users import STALL_SECONDS, ReplyRecord

PHASES = {
    "lora": ("export", "wait", "reach", "check", "transfer", "load", "verify", "switch", "trained_to_served"),
    "full": ("export", "wait", "check", "drain", "load", "verify", "exchange", "switch", "trained_to_served"),
}
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
Span = tuple[float, float]


@dataclass
class Spans:
    """Spans of releases and of idle periods, on `time.perf_counter`.

    `loaded_everywhere`: milliseconds from live until every replica has the version loaded. `verified_everywhere`: how
    many versions every replica had verified when they went live. Of the others the phases are those of some replicas.
    """

    releases: list[Span] = field(default_factory=list)
    idle: list[Span] = field(default_factory=list)
    loaded_everywhere: list[float] = field(default_factory=list)
    verified_everywhere: int = 0


@dataclass
class SwapFigures:
    """The figures of one fleet, or of several fleets of the same kind together.

    Args:
        milliseconds: Durations by row of the table.
        counts: What the sentences below the table count.
        by_engine: Complete replies by the engine that answered, with its kind.
    """

    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    replies: list[ReplyRecord] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    by_engine: Counter[str] = field(default_factory=Counter)
    largest_distance: float = 0.0

    def add(self, other: "SwapFigures") -> None:
        for row, values in other.milliseconds.items():
            self.milliseconds.setdefault(row, []).extend(values)
        self.replies += other.replies
        self.counts += other.counts
        self.by_engine += other.by_engine
        self.largest_distance = max(self.largest_distance, other.largest_distance)


async def measure(
    deployment: SwapDeployment,
    replies: list[ReplyRecord],
    spans: Spans,
    call_times: list[float],
    load_times: list[float],
) -> SwapFigures:
    """Read the figures of a deployment whose users have left, and recompute the log-probs of all replies."""
    async with deployment.db.read() as session:
        rows = await session.scalars(select(Version).order_by(Version.number, Version.id))
        versions = [version for version in rows if "trained_to_served" in version.timings]
        mixed = await session.scalar(
            select(func.count()).where(Turn.exclusion_reason.startswith("the weights changed"))
        )
    delays = await switch_delays(deployment)
    recomputed = await check_logprobs(deployment.db, deployment.settings)
    phases = PHASES[deployment.settings.trainer.adaptation]
    milliseconds = {
        phase: [1000 * version.timings[phase] for version in versions if phase in version.timings] for phase in phases
    }
    milliseconds = {phase: values for phase, values in milliseconds.items() if values} | {
        "deployment switch → last new turn on the old version": delays["deployment.deployed"],
        "the same, for a rollback": delays["deployment.rolled_back"],
        "the API call of a rollback or deploy": call_times,
        "from that call until a replica has the version": load_times,
        "first token, during a release": first_token_times(replies, spans.releases),
        "first token, idle": first_token_times(replies, spans.idle),
        "live → loaded by every replica": spans.loaded_everywhere,
    }
    counts = Counter(
        publications=len(versions),
        verified_everywhere=spans.verified_everywhere,
        switches=sum(len(values) for values in delays.values()),
        mixed=mixed or 0,
        misnamed=await count_misnamed(deployment.db, replies),
        recomputed=recomputed.replies,
        mislabelled=recomputed.mislabelled,
    )
    by_engine = await count_by_engine(deployment.db)
    return SwapFigures(milliseconds, list(replies), counts, by_engine, recomputed.largest_distance)


async def count_misnamed(db: Database, replies: Sequence[ReplyRecord]) -> int:
    """Count the replies that named another version to the user than the recorded one."""
    async with db.read() as session:
        rows = await session.execute(
            select(Turn.completion_id, Version.number).join(Version, Version.id == Turn.version_id)
        )
        labels = {id: f"{POLICY}@v{number}" for id, number in rows}
    return sum(labels.get(reply.id or "") != reply.label for reply in replies if reply.failure is None)


async def count_by_engine(db: Database) -> Counter[str]:
    """Count the complete replies to users by engine. Example: {"engine-0 (sglang)": 12}"""
    async with db.read() as session:
        rows = await session.execute(
            select(Engine.name, Engine.kind, func.count(Turn.id))
            .join(Turn, Turn.engine == Engine.name)
            .where(Turn.origin == Origin.CHAT, Turn.state == TurnState.DONE)
            .group_by(Engine.name, Engine.kind)
            .order_by(Engine.name)
        )
        return Counter({f"{name} ({kind})": count for name, kind, count in rows})


async def switch_delays(deployment: SwapDeployment) -> dict[str, list[float]]:
    """Return milliseconds from each deployment switch to the last new turn on an old version, by audit action."""
    async with deployment.db.read() as session:
        switches = [
            (row.action, row.created_at, int(row.subject.rpartition("v")[2]))
            for row in await session.scalars(
                select(Audit)
                .where(Audit.action.in_(("deployment.deployed", "deployment.rolled_back")))
                .order_by(Audit.seq)
            )
        ]
        turns = (
            await session.execute(
                select(Turn.created_at, Version.number)
                .join(Version, Version.id == Turn.version_id)
                .where(Turn.origin == Origin.CHAT)
                .order_by(Turn.created_at)
            )
        ).all()
    delays: dict[str, list[float]] = {"deployment.deployed": [], "deployment.rolled_back": []}
    ends = [switched_at for _, switched_at, _ in switches[1:]] + [float("inf")]
    for (action, switched_at, number), until in zip(switches, ends, strict=True):
        late = [at - switched_at for at, version in turns if switched_at < at < until and version != number]
        delays[action].append(1000 * max(late, default=0.0))
    return delays


def spread(values: Sequence[float], digits: int = 0) -> str:
    shares = " | ".join(f"{quantile(values, share):.{digits}f}" for share in SHARES.values())
    return f"{shares} | {max(values, default=float('nan')):.{digits}f}"


def first_token_times(replies: Sequence[ReplyRecord], spans: Sequence[Span]) -> list[float]:
    """Return the milliseconds to the first token of the replies that were requested in the spans."""
    return [
        1000 * (reply.first_at - reply.requested_at)
        for reply in replies
        if reply.failure is None and any(start <= reply.requested_at < ended for start, ended in spans)
    ]


def summarize_replies(replies: Sequence[ReplyRecord]) -> str:
    failures = [reply.failure for reply in replies if reply.failure]
    stalls = sum(reply.largest_gap > STALL_SECONDS for reply in replies)
    largest_gap = max((reply.largest_gap for reply in replies), default=0.0)
    counts = f"{len(replies)} replies, {len(failures)} failed, cut or misnamed, {stalls} stalled"
    return f"{counts}; largest gap {largest_gap:.2f} s" + (f" ({failures[:3]})" if failures else "")


def summarize(figures: SwapFigures, *, full: bool = False) -> str:
    """Return the sentences below the table."""
    counts = figures.counts
    good = sum(reply.failure is None for reply in figures.replies)
    lines = [
        f"{counts['publications']} publications, {counts['switches']} switches of the deployment: "
        f"{summarize_replies(figures.replies)}",
        f"replies by engine: {', '.join(f'{engine} {count}' for engine, count in figures.by_engine.items())}",
        f"{counts['verified_everywhere']} of {counts['publications']} versions were verified by every replica when "
        "they went live (the phases of any other leave out its slowest replica)",
    ]
    if full:
        lines.append(
            f"{counts['mixed']} replies continued with other weights than they start with, and are not trained on"
        )
    lines.append(
        f"{counts['misnamed']} named another version than the recorded one; recomputed: {counts['recomputed']} of "
        f"{good} good replies, {counts['mislabelled']} not from the version they name (largest distance "
        f"{figures.largest_distance:.1e})"
    )
    return "\n".join(lines)


def print_report(fleets: Mapping[str, SwapFigures], *, full: bool = False) -> None:
    """Print the tables of all fleets side by side, and then what became of the replies of each. Keys: their names."""
    columns = (*SHARES, "worst")
    several = len(fleets) > 1
    heads = [
        f"{name} {column}" if several and column == columns[0] else column for name in fleets for column in columns
    ]
    print(f"\n| milliseconds | {' | '.join(heads)} |\n|{'---|' * (1 + len(heads))}")
    for row in next(iter(fleets.values())).milliseconds:
        cells = (spread(figures.milliseconds.get(row, []), 1) for figures in fleets.values())
        print(f"| {row} | {' | '.join(cells)} |")
    for name, figures in fleets.items():
        print(f"\n{name}: {summarize(figures, full=full)}")
    print(flush=True)
