"""Run the release gates on a verified version: metric limits, user functions, and held-out prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from alignment.release.gates import Candidate, FunctionGate, MetricGate, PromptScores, PromptsGate, load_gate
from alignment.signals.verifiers import RIGHT
from alignment.tolerance import exceeds
from app.core.database import Database
from app.core.settings import Settings
from app.engines.adaptation import adaptation_of
from app.inference.capture import Capture
from app.inference.engine import EngineClient
from app.inference.request import BELOW_CHATS, ChatCall, Sampling
from app.inference.transport import EngineRefused, EngineUnavailable
from app.models import Dataset, DatasetKind, DatasetRow, Policy, Version, new_id
from app.policies import references, repository
from workers.queue.run_user_code import UserCodeError, run_user_code
from workers.rollouts import prompt_sets

GateKinds = tuple[type[MetricGate | FunctionGate | PromptsGate], ...]

MAX_CONCURRENT_PROMPTS = 8


@dataclass
class GateRunner:
    """Runs the configured gates on one version. `metrics` collects the version's metrics, named gate/<name>."""

    db: Database
    settings: Settings
    policy: Policy
    version: Version
    metrics: dict[str, float] = field(default_factory=dict)

    async def first_refusal(self, client: EngineClient, kinds: GateKinds) -> str | None:
        """Run the gates of these kinds, in order. Return why the first one refuses, or None if all pass.

        `client` reaches an engine that has loaded the version, if prompts are among the kinds.

        Raises:
            EngineUnavailable: the engine failed during a prompt, which is no verdict.
        """
        for gate in self.settings.release.gates:
            if not isinstance(gate, kinds):
                continue
            if isinstance(gate, MetricGate):
                reason = gate.rejection_reason(self.version.metrics)
            elif isinstance(gate, FunctionGate):
                reason = await self._run_function(gate)
            else:
                reason = await self._run_prompts(client, gate)
            if reason is not None:
                return f"gate {gate.name}: {reason}"
        return None

    async def _run_function(self, gate: FunctionGate) -> str | None:
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
            reason = await run_user_code(lambda: load_gate(gate.function)(candidate), gate.timeout_seconds, noun="gate")
        except UserCodeError as error:  # a gate that cannot be run has not passed
            return f"its function failed: {error}"
        return None if reason is None else str(reason)[:1000]

    async def _run_prompts(self, client: EngineClient, gate: PromptsGate) -> str | None:
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
                    .limit(gate.max_prompts)
                )
            )
            deployment = await repository.get_deployment(session, self.policy.id)
            serving = await repository.get_version(session, deployment.version_id)
        if not rows:
            return f"there is no dataset of prompts named {gate.dataset!r}"
        try:
            candidate = await self._answer_prompts(client, gate, self.version, rows)
            baseline = await self._answer_prompts(client, gate, serving, rows) if gate.compares else None
        except EngineRefused as error:  # permanent, such as a prompt that is too long: a retry would be refused too
            return f"the request failed: {error}"
        if candidate.share is not None:
            self.metrics[f"gate/{gate.name}"] = candidate.share
        return gate.rejection_reason(candidate, baseline)

    async def _answer_prompts(
        self, client: EngineClient, gate: PromptsGate, version: Version, rows: Sequence[DatasetRow]
    ) -> PromptScores:
        """Let the version answer the prompts, and summarize the verifier's scores and the lengths in tokens."""
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

        async def answer(row: DatasetRow) -> tuple[Capture, float | None]:
            async with semaphore:
                capture = await self._complete(client, gate, version, row)
                return capture, await self._verify(gate, row, capture)

        tasks = [asyncio.create_task(answer(row)) for row in rows]
        try:
            results = await asyncio.gather(*tasks)
        finally:  # after a failure the other replies are not needed
            for task in tasks:
                task.cancel()
        scores = [score for _, score in results if score is not None]
        lengths = [len(capture.output_ids) for capture, _ in results]
        return PromptScores(
            sum(not exceeds(RIGHT, score) for score in scores), len(scores), sum(lengths) / len(lengths)
        )

    async def _complete(self, client: EngineClient, gate: PromptsGate, version: Version, row: DatasetRow) -> Capture:
        adaptation = adaptation_of(self.settings)
        call = ChatCall(
            rid=new_id("chatcmpl"),
            messages=row.content["messages"],
            sampling=Sampling(gate.max_tokens, temperature=gate.temperature),
            target=adaptation.target(version, self.policy.base_model, references.version_name(self.policy, version)),
            priority=BELOW_CHATS,
        )
        try:
            async with asyncio.timeout(gate.timeout_seconds):
                return (await client.complete(call)).capture
        except TimeoutError as error:
            await client.abort(call.rid)
            raise EngineUnavailable(f"no reply to a prompt of {gate.name} in {gate.timeout_seconds:g} s") from error

    async def _verify(self, gate: PromptsGate, row: DatasetRow, capture: Capture) -> float | None:
        """Return the verifier's score, or None if it gives none. A reply that it cannot judge is wrong."""
        try:
            return await prompt_sets.verify_reply(
                gate.verifier.model_dump(mode="json"), self.settings, row.content, capture
            )
        except prompt_sets.VerifierError:
            return -RIGHT
