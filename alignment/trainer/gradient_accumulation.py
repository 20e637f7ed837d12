"""The gradient of an optimizer step: forward and backward passes of its micro-batches, with their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.algorithms.base import RLAlgorithm
from alignment.functional import kl_estimate
from alignment.functional.aggregation import apply_mask
from alignment.models import parallel
from alignment.models.base_model import ModelRole
from alignment.models.policy_model import PolicyModel
from alignment.trainer.loss_part import LossPart, Step
from alignment.trainer.loss_reduction import LossReducer, MinibatchCounts, sum_metrics
from alignment.trainer.metrics import MetricAccumulator
from alignment.trainer.scoring import score_micro_batch, score_with_entropy
from alignment.types import CriticMicroBatch, Metric, MicroBatch

PARENT_KL = "actor/parent_kl"  # the metric that `max_kl` limits


@dataclass(frozen=True)
class GradientAccumulator:
    """Computes the gradients of an update. `algorithm` trains all `roles`, the losses of other parts the actor alone.

    PARENT_KL is among the metrics if `enforces_max_kl`.
    """

    policy: PolicyModel
    algorithm: RLAlgorithm
    roles: Sequence[ModelRole]
    enforces_max_kl: bool

    def accumulate(self, parts: Sequence[LossPart], minibatches: Sequence[Step | None]) -> dict[str, float]:
        """Leave the gradient of the parts' minibatches on the parameters, and return their metrics.

        Every rank returns the same.
        """
        accumulator = MetricAccumulator()
        for part, planned in zip(parts, minibatches, strict=True):
            minibatch, micro_batches = planned or ([], [])
            counts = MinibatchCounts.of(part.data, minibatch, part.coupled)
            for micro_batch in micro_batches[parallel.rank() :: parallel.num_ranks()]:
                # A rank with an empty micro-batch computes another one with weight 0, to take part in the collectives.
                rows = micro_batch or min((other for other in micro_batches if other), key=len)
                roles: Sequence[ModelRole] = self.roles if part.algorithm is self.algorithm else ("actor",)
                for role in roles:
                    self._backward(part, role, counts, rows, accumulator, weight=float(bool(micro_batch)))
        return accumulator.totals()

    def _backward(
        self,
        part: LossPart,
        role: ModelRole,
        counts: MinibatchCounts,
        rows: list[int],
        accumulator: MetricAccumulator,
        weight: float,
    ) -> None:
        """Run the forward and backward pass of one micro-batch, and add its metrics. `weight` is 1 or 0."""
        algorithm, place = part.algorithm, (part.data, tuple(rows), part.coupled_rows(rows))
        sequences, mask_BT = [part.sequences[index] for index in rows], part.data.response_mask_BT[rows]
        if role == "critic":
            values = CriticMicroBatch(*place, score_micro_batch(self.policy, sequences, mask_BT, role))
            reduced = LossReducer(counts).reduce(algorithm.compute_value_loss(values), values, "critic/vf_loss")
        else:
            if algorithm.needs_entropy:
                inputs = MicroBatch(*place, *score_with_entropy(self.policy, sequences, mask_BT))
            else:
                inputs = MicroBatch(*place, score_micro_batch(self.policy, sequences, mask_BT, role))
            reducer = LossReducer(counts, algorithm.aggregation, algorithm.horizon)
            reduced = reducer.reduce(algorithm.compute_loss(inputs), inputs, "actor/pg_loss")
            reduced.metrics.update(sum_metrics(self._divergence_metrics(inputs), inputs) | reduced.metrics)
        loss = reduced.loss * weight * part.weight
        torch.autograd.backward(loss * parallel.num_ranks())  # FSDP averages over the ranks
        accumulator.add(reduced, weight, part.prefix)

    def _divergence_metrics(self, inputs: MicroBatch) -> dict[str, Tensor | Metric]:
        """Return how far the current policy is from the recorded log-probs and from the old policy, per token.

        If `max_kl` is enforced, the recorded log-probs stand in for an old policy that was not scored. An algorithm
        that reports `actor/ppo_kl_k3` itself replaces the value. PARENT_KL is the part of it on replies of the old
        policy: on others' k3 is no KL, and a rare token of them may count e^20.
        """
        new_BT, rollout_BT = inputs.logprobs_BT.detach(), inputs.rollout_logprobs_BT
        metrics: dict[str, Tensor | Metric] = {"rollout_corr/mismatch": (new_BT - rollout_BT).abs()}
        if inputs.batch.old_logprobs_BT is not None:
            metrics["actor/ppo_kl_k3"] = kl_estimate(inputs.old_logprobs_BT, new_BT, "k3")
        elif self.enforces_max_kl:
            metrics["actor/ppo_kl_k3"] = kl_estimate(rollout_BT, new_BT, "k3")
        if self.enforces_max_kl:
            old_BT = rollout_BT if inputs.batch.old_logprobs_BT is None else inputs.old_logprobs_BT
            is_own_B1 = [[inputs.batch.samples[index].lag == 0] for index in inputs.row_indices]
            own_mask_BT = inputs.response_mask_BT * torch.tensor(is_own_B1, device=new_BT.device)
            kl_BT = apply_mask(kl_estimate(old_BT, new_BT, "k3"), own_mask_BT)
            metrics[PARENT_KL] = Metric(kl_BT.sum(), own_mask_BT.sum())
        return metrics
