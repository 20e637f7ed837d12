"""The judge stage: judgements of finished turns → rewards.

Judgements are created for finished turns, and claimed when due, with a limit for each source. Each is recorded once,
under its fence, in one transaction with its reward. The trainer claims the judgements of reward models, see
`workers.judging.reward_model_source`.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence

import httpx2
from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.config.rewards import LEARNED, EndpointConfig, JudgeSource, NextTurnSource, RewardsConfig
from alignment.signals.combine_rewards import is_in_share
from alignment.signals.rules import NeedsNextMessage
from app.core.database import Database, dialect_insert, now
from app.core.jobs import enqueue_after_commit
from app.core.leases import lease_is_free
from app.core.rows import AnyRow
from app.core.settings import Settings
from app.models import Judgement, JudgementState, Origin, Policy, Turn, TurnState, new_id
from app.models.reward import JudgementDetails
from app.projects.service import NO_CONSENT
from app.training.policy_config import effective_rewards
from workers.feedback import rater_trust, rewards, sample_groups, signals
from workers.judging.http_client import open_client
from workers.judging.request import DELETED, NO_REPLY, Answer, Usage, build_request
from workers.judging.sources import Answers, get_answers
from workers.queue.leased_job import (
    AttemptFailed,
    JobEnded,
    JobPostponed,
    JobSkipped,
    LeasedJob,
    claim_row,
    finish_row,
    is_due,
    run_jobs,
    sanitize_text,
)
from workers.stage_metrics import JUDGE_REQUESTS

log = logging.getLogger("attune.judge")
POLL_SECONDS = 1.0  # how often new judgements are claimed while others run
SOURCE_PAUSE_SECONDS = 5.0  # of a source that did not answer, so that others get its capacity
MAX_RUNNING = 16
MAX_RUNNING_PER_SOURCE = 4  # so that a slow source leaves room for the others
SourceKey = tuple[str, str]  # (policy id, source name)


async def create_judgements(
    session: AsyncSession, turns: Sequence[AnyRow], configs: Mapping[str, RewardsConfig]
) -> None:
    """Create the judgements of finished turns. `turns` are rows of turn columns, `configs` is by policy."""
    defaults = {"state": JudgementState.OPEN, "details": {}, "attempt": 0, "fence": 0}
    rows = [
        {"id": new_id("jdg"), "turn_id": turn_id, "policy_id": turn.policy_id, "source": source, **defaults}
        for turn in turns
        for turn_id, source in _sources_to_ask(turn, configs[turn.policy_id])
    ]
    if not rows:
        return
    statement = dialect_insert(session, Judgement.__table__).values({"due_at": now(), "created_at": now()})
    await session.execute(statement.on_conflict_do_nothing(index_elements=["turn_id", "source"]), rows)
    enqueue_after_commit(session, "judge")
    if any(row["source"] == LEARNED for row in rows):
        enqueue_after_commit(session, "train")  # the trainer runs the reward model


def _sources_to_ask(turn: AnyRow, config: RewardsConfig) -> list[tuple[str, str]]:
    """Return (turn id, source) for the turn itself, and for the turn before it, for which its prompt is evidence."""
    is_judged = turn.origin not in (Origin.PROMPT_SET, Origin.TASK)
    if turn.exclusion_reason == NO_CONSENT or turn.deleted_at is not None or not is_judged:
        return []
    pairs: list[tuple[str, str]] = []
    for source in config.sources:
        if source.type == "next_turn":
            if turn.parent_id is not None:
                pairs.append((turn.parent_id, source.name))
        elif source.type != "explicit" and turn.state != TurnState.REFUSED:  # no reply to ask about
            share = source.share if isinstance(source, EndpointConfig) else 1.0
            # The replies to one prompt are judged together or not at all.
            if is_in_share(turn.shadow_of_id or turn.completion_id, source.name, share):
                pairs.append((turn.id, source.name))
    return pairs


async def claim_judgements(
    db: Database, settings: Settings, owner: str, running: Counter[SourceKey], paused: Collection[SourceKey]
) -> list[tuple[Judgement, ...]]:
    """Claim due judgements up to the limits. Replies that are compared with each other are claimed together.

    Each place goes to the project with the fewest running jobs, so that the backlog of one delays no other. `running`
    counts the jobs of each source; sources in `paused` are left out.
    """
    claimed: list[tuple[Judgement, ...]] = []
    running = running.copy()
    async with db.write() as session:
        waiting = await _read_waiting_policies(session)
        projects = await _read_projects(session, waiting | {policy_id for policy_id, _ in running})
        while waiting and running.total() < MAX_RUNNING:
            full = {key for key, count in running.items() if count >= MAX_RUNNING_PER_SOURCE}
            jobs_of: Counter[str] = Counter()
            for (policy_id, _), count in running.items():
                jobs_of[projects[policy_id]] += count
            policy_id = min(waiting, key=lambda id: (jobs_of[projects[id]], random.random()))
            try:
                async with session.begin_nested():
                    judgements = await _claim_due(session, settings, owner, policy_id, full | set(paused))
            except DBAPIError:
                raise
            except Exception:  # of this policy's settings, for example: the others are claimed
                log.exception("judgements of policy %s could not be claimed", policy_id)
                judgements = None
            if judgements is None:
                waiting.remove(policy_id)
            elif judgements:
                running[policy_id, judgements[0].source] += 1
                claimed.append(judgements)
    return claimed


async def _claim_due(
    session: AsyncSession, settings: Settings, owner: str, policy_id: str, excluded: Collection[SourceKey]
) -> tuple[Judgement, ...] | None:
    """Claim the policy's next judgement, with those of replies that are compared with it.

    Returns None if none is due, and () if it had no attempt left.
    """
    judgement = await _read_due(session, policy_id, excluded)
    if judgement is None:
        return None
    if not await claim_row(session, judgement, owner, settings):
        return ()
    return (judgement, *await _claim_compared(session, settings, owner, judgement))


async def _read_waiting_policies(session: AsyncSession) -> set[str]:
    """Return the policies with open judgements. Each is one step in an index."""
    policies: set[str] = set()
    last: str | None = ""
    is_next = (Judgement.state == JudgementState.OPEN, Judgement.source != LEARNED)
    while (
        last := await session.scalar(select(func.min(Judgement.policy_id)).where(*is_next, Judgement.policy_id > last))
    ) is not None:
        policies.add(last)
    return policies


async def _read_projects(session: AsyncSession, policies: Collection[str]) -> dict[str, str]:
    """Return the projects of policies, by policy."""
    rows = await session.execute(select(Policy.id, Policy.project_id).where(Policy.id.in_(policies)))
    return {id: project_id for id, project_id in rows}


async def _read_due(session: AsyncSession, policy_id: str, excluded: Collection[SourceKey]) -> Judgement | None:
    """Lock and return the policy's judgement that has been due for the longest time."""
    query = select(Judgement).where(is_due(Judgement), Judgement.source != LEARNED, Judgement.policy_id == policy_id)
    sources = [source for policy, source in excluded if policy == policy_id]
    query = query.where(Judgement.source.not_in(sources)).order_by(Judgement.due_at, Judgement.id).limit(1)
    return await session.scalar(query.with_for_update(skip_locked=True))


async def _claim_compared(
    session: AsyncSession, settings: Settings, owner: str, judgement: Judgement
) -> list[Judgement]:
    """Claim the judgements by the same source of the other replies of the completion, if the source compares them."""
    policy = await session.get_one(Policy, judgement.policy_id)
    source = effective_rewards(policy, settings).source(judgement.source)
    if not isinstance(source, JudgeSource) or not source.compare:
        return []
    completion_id = select(Turn.completion_id).where(Turn.id == judgement.turn_id).scalar_subquery()
    others = await session.scalars(
        select(Judgement)
        .join(Turn, Turn.id == Judgement.turn_id)
        .where(
            Turn.completion_id == completion_id,
            Judgement.source == judgement.source,
            Judgement.id != judgement.id,
            Judgement.state == JudgementState.OPEN,
            lease_is_free(Judgement),
        )
        .order_by(Judgement.id)
        .with_for_update(of=Judgement, skip_locked=True)
    )
    return [other for other in others if await claim_row(session, other, owner, settings)]


class JudgementJob(LeasedJob[Judgement, Answers]):
    """One question to one source: about one judgement, or about replies that are compared with each other."""

    def __init__(
        self,
        db: Database,
        settings: Settings,
        judgements: Sequence[Judgement],
        http: httpx2.AsyncClient,
        paused: MutableMapping[SourceKey, float],
    ) -> None:
        """`paused` maps sources that do not answer to the monotonic time of the next attempt."""
        super().__init__(db, settings, judgements)
        self.source_key: SourceKey = (judgements[0].policy_id, judgements[0].source)
        self._http, self._paused = http, paused
        self._usage, self._start, self._is_from_user = Usage(), time.monotonic(), False

    async def execute(self) -> Answers:
        async with self.db.read() as session:
            request = await build_request(session, self.settings, self.rows)
        self._is_from_user = isinstance(request.source, NextTurnSource)
        result = None  # also when the worker stops and the request is cancelled
        try:
            answers = await get_answers(request, self._http, self.settings, self._usage)
            result = "answered"
            return answers
        except NeedsNextMessage as error:
            result = "postponed" if request.seconds_left > 0 else "skipped"
            if request.seconds_left > 0:
                raise JobPostponed(request.poll_seconds) from error
            raise JobSkipped(str(error)) from error
        except AttemptFailed:
            result = "failed"
            self._paused[self.source_key] = time.monotonic() + SOURCE_PAUSE_SECONDS
            raise
        except JobEnded as end:
            result = end.state
            raise
        finally:
            if result is not None:
                JUDGE_REQUESTS.labels(self.source_key[1], result).inc()

    async def record(self, session: AsyncSession, row: Judgement, result: Answers) -> None:
        answer = result.get(row.turn_id)
        if answer is None or await sample_groups.lock_and_find_deleted(session, [row.turn_id]):
            await self.close(session, row, JudgementState.SKIPPED, NO_REPLY)
            return
        rater, weight = None, 1.0
        if self._is_from_user:  # the evidence is the user's next message
            [turn] = await signals.read_finished_turns(session, [row.turn_id])
            rater, weight = signals.end_user_rater(turn), rater_trust.newcomer_trust(self.settings).weight
        await rewards.record_reward(session, row.turn_id, row.source, answer.value, rater=rater, weight=weight)
        await self._finish(session, row, JudgementState.DONE, None, answer)

    async def close(self, session: AsyncSession, row: Judgement, state: str, reason: str) -> None:
        is_deleted = await sample_groups.lock_and_find_deleted(session, [row.turn_id])
        await self._finish(session, row, state, DELETED if is_deleted else reason)

    async def _finish(
        self, session: AsyncSession, row: Judgement, state: str, reason: str | None, answer: Answer | None = None
    ) -> None:
        details = self._details(row)
        if answer is not None and answer.explanation:
            details["explanation"] = sanitize_text(answer.explanation)
        await finish_row(session, row, state, reason, value=answer and answer.value, details=details)
        await rewards.update_turn_samples(session, {row.turn_id}, self.settings)

    def retry_values(self, row: Judgement) -> dict[str, object]:
        return {"details": self._details(row)}

    def _details(self, row: Judgement) -> JudgementDetails:
        """Return the requests of all attempts, and the tokens and seconds of this one.

        The first of several judgements that are compared has the usage of all.
        """
        usage = self._usage if row is self.rows[0] else Usage()
        num_requests = row.details.get("requests", 0) + usage.requests
        details: JudgementDetails = {"requests": num_requests, "seconds": round(time.monotonic() - self._start, 3)}
        if usage.tokens:
            details["tokens"] = usage.tokens
        return details


async def judge(db: Database, settings: Settings, owner: str) -> int:
    """Ask the sources of all due judgements. Returns the number of judgements that reached a final state."""
    paused: dict[SourceKey, float] = {}
    async with open_client(settings) as http:

        async def claim_jobs(running: Collection[JudgementJob]) -> list[JudgementJob]:
            excluded = [key for key, end in paused.items() if end > time.monotonic()]
            counts = Counter(job.source_key for job in running)
            claimed = await claim_judgements(db, settings, owner, counts, excluded)
            return [JudgementJob(db, settings, judgements, http, paused) for judgements in claimed]

        return await run_jobs(db, "judge", claim_jobs, poll_seconds=POLL_SECONDS)
