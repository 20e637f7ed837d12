"""Proven version → passed, or refused with a reason: metrics, functions of one's own, held-out prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from alignment.release.gates import Answers, Candidate, FunctionGate, MetricGate, PromptsGate, load
from alignment.signals.verifiers import RIGHT
from app.core.database import Database
from app.core.settings import Settings
from app.inference.capture import Capture
from app.inference.client import EngineClient
from app.inference.errors import EngineRefused, EngineUnavailable
from app.inference.request import ChatCall, Sampling
from app.models import Dataset, DatasetKind, DatasetRow, Policy, Version, new_id
from app.policies import repository, service
from workers.queue import run_user_code
from workers.rollouts import verify

AT_ONCE = 8
PRIORITY = -1  # behind chats


@dataclass
class Gates:
    """Of one version. `client`: a replica that holds it. `figures` are for its metrics: gate/<name>."""

    db: Database
    settings: Settings
    client: EngineClient
    policy: Policy
    version: Version
    figures: dict[str, float] = field(default_factory=dict)

    async def refusal(self, *kinds: type[MetricGate | FunctionGate | PromptsGate]) -> str | None:
        """The first gate's of these kinds, or of all, that says no, and why. Raises EngineUnavailable."""
        for gate in self.settings.gates:
            if kinds and not isinstance(gate, kinds):
                continue
            if isinstance(gate, MetricGate):
                why = gate.refusal(self.version.metrics)
            elif isinstance(gate, FunctionGate):
                why = await self._function(gate)
            else:
                why = await self._prompts(gate)
            if why is not None:
                return f"gate {gate.name}: {why}"
        return None

    async def _function(self, gate: FunctionGate) -> str | None:
        async with self.db.read() as session:
            parent = await session.get(Version, self.version.parent_id) if self.version.parent_id else None
        candidate = Candidate(
            policy=self.policy.name,
            number=self.version.number,
            parent=parent.number if parent else None,
            base_model=self.policy.base_model,
            adapter_path=self.version.adapter_path or "",
            metrics=dict(self.version.metrics),
        )
        try:
            told = await run_user_code.run(lambda: load(gate.function)(candidate), gate.timeout_seconds, noun="gate")
        except run_user_code.Failed as error:  # what cannot be asked has not passed
            return f"it could not be asked: {error}"
        return None if told is None else str(told)[:1000]

    async def _prompts(self, gate: PromptsGate) -> str | None:
        async with self.db.read() as session:
            rows = list(
                await session.scalars(
                    select(DatasetRow)
                    .join(Dataset, Dataset.id == DatasetRow.dataset_id)
                    .where(
                        Dataset.project_id == self.policy.project_id,
                        Dataset.name == gate.dataset,
                        Dataset.kind == DatasetKind.PROMPTS,
                    )
                    .order_by(DatasetRow.row_number)
                    .limit(gate.most)
                )
            )
            deployment = await repository.deployment_of(session, self.policy.id)
            serving = await repository.version(session, deployment.version_id)
        if not rows:
            return f"there is no dataset of prompts named {gate.dataset!r}"
        try:
            candidate = await self._answers(gate, self.version, rows)
            beside = await self._answers(gate, serving, rows) if gate.compares else None
        except EngineRefused as error:  # a prompt that is too long, say: it will be the next time
            return f"it could not be asked: {error}"
        if candidate.share is not None:
            self.figures[f"gate/{gate.name}"] = candidate.share
        return gate.refusal(candidate, beside)

    async def _answers(self, gate: PromptsGate, version: Version, rows: Sequence[DatasetRow]) -> Answers:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(row: DatasetRow) -> tuple[Capture, float | None]:
            async with room:
                capture = await self._ask(gate, version, row)
                return capture, await self._worth(gate, row, capture)

        works = [asyncio.create_task(one(row)) for row in rows]
        try:
            heard = await asyncio.gather(*works)
        finally:  # after a failure nobody waits for the others
            for work in works:
                work.cancel()
        worths = [worth for _, worth in heard if worth is not None]
        lengths = [len(capture.output_ids) for capture, _ in heard]
        return Answers(sum(worth >= RIGHT for worth in worths), len(worths), sum(lengths) / len(lengths))

    async def _ask(self, gate: PromptsGate, version: Version, row: DatasetRow) -> Capture:
        call = ChatCall(
            rid=new_id("chatcmpl"),
            messages=row.content["messages"],
            sampling=Sampling(gate.max_tokens, temperature=gate.temperature),
            adapter=version.adapter,
            model=service.label(self.policy, version),
            extra_key=version.weights or self.policy.base_model,
            weights=version.weights,
            priority=PRIORITY,
        )
        try:
            async with asyncio.timeout(gate.timeout_seconds):
                return (await self.client.complete(call)).capture
        except TimeoutError as error:
            await self.client.abort(call.rid)
            raise EngineUnavailable(f"no reply to a prompt of {gate.name} in {gate.timeout_seconds:g} s") from error

    async def _worth(self, gate: PromptsGate, row: DatasetRow, capture: Capture) -> float | None:
        """None when the verifier has nothing to say; what it cannot judge is wrong."""
        try:
            return await verify.worth(gate.verifier.model_dump(mode="json"), self.settings, row.content, capture)
        except verify.Unverified:
            return -RIGHT
