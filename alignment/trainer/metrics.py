"""Metrics of an update, under the names that verl's dashboards use, and the KL divergence that the KL guard reads."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

import torch
from torch import Tensor

from alignment.data.micro_batches import ScoredSequence
from alignment.errors import NonFiniteUpdate
from alignment.functional import kl_estimate
from alignment.models import parallel
from alignment.models.policy_model import PolicyModel
from alignment.trainer.scoring import score_micro_batches
from alignment.types import Sample, TrainData

MIN_KL_SEQUENCES = 32


class MetricAccumulator:
    """Sums the metrics of one optimizer step over its micro-batches and ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add the metrics of one micro-batch."""
        for name, value in metrics.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def totals(self) -> dict[str, float]:
        """Return the sums over all ranks. All ranks must call it, with the same metric names."""
        names = sorted(self.sums)
        values = parallel.sum_over_ranks(torch.stack([self.sums[name].float() for name in names]))
        return dict(zip(names, values.tolist(), strict=True))


def average_steps(steps: Sequence[dict[str, float]], steps_per_epoch: int) -> dict[str, float]:
    """Return the means over all steps; `reference_kl` over the last epoch, which is closest to the new policy."""
    metrics = {name: fmean(step[name] for step in steps) for name in steps[0]}
    if "reference_kl" in metrics:
        metrics["reference_kl"] = fmean(step["reference_kl"] for step in steps[-steps_per_epoch:])
    return metrics


class Stopwatch:
    """Measures the seconds of each phase of an update, as `timing_s/*`."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the duration of a `with` block as `timing_s/<name>`."""
        started = time.perf_counter()
        yield
        self.metrics[f"timing_s/{name}"] = time.perf_counter() - started


def batch_metrics(samples: Sequence[Sample], data: TrainData) -> dict[str, float]:
    """Return statistics of the batch: rewards, lengths in tokens, staleness in versions, entropy and advantages.

    `samples` is the whole batch, `data` the part that the algorithm selected.
    """
    is_output = data.mask_BT.bool()
    logprobs_BT = data.old_logprobs_BT if data.old_logprobs_BT is not None else data.rollout_logprobs_BT
    metrics = {
        **_summarize("critic/score", torch.tensor([sample.reward for sample in samples])),
        **_summarize("response_length", torch.tensor([float(len(sample.output_ids)) for sample in samples])),
        **_summarize("prompt_length", torch.tensor([float(len(sample.prompt_ids)) for sample in samples])),
        "perf/total_num_tokens": float(sum(sample.num_tokens for sample in samples)),
        "training/samples": float(len(samples)),
        "training/samples_left_out": float(len(samples) - len(data.samples)),
        "training/off_policy/trajectory_staleness": fmean(sample.lag for sample in samples),
        "training/off_policy/trajectory_staleness_worst": float(max(sample.lag for sample in samples)),
        "actor/entropy": -float(logprobs_BT[is_output].mean()),  # an estimate: the policy drew the samples itself
    }
    if data.advantages_BT is not None:
        metrics |= _summarize("critic/advantages", data.advantages_BT[is_output])
    return metrics


@torch.no_grad()
def measure_update_kl(
    policy: PolicyModel, data: TrainData, sequences: Sequence[ScoredSequence], micro_batches: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Measure how far the new policy is from the one before the update.

    Return `guard/kl`, the k3 estimate of KL(old ‖ new policy) in nats per token, and its `guard/tokens`.

    It is measured on part of the batch: replies of the old policy if there are any, because the mean of k3 over a
    policy's own samples is an unbiased estimate of its KL to another policy (Schulman, 2020); otherwise replies of
    earlier versions. Without log-probs of the old policy the recorded log-probs are used. All ranks must call it with
    the same `micro_batches`. Raises NonFiniteUpdate.
    """
    samples = data.samples
    usable = {index for index, sample in enumerate(samples) if sample.lag == 0} or set(range(len(samples)))
    selected: list[Sequence[int]] = []
    num_usable, num_ranks = 0, parallel.num_ranks()
    for start in range(0, len(micro_batches), num_ranks):  # each rank gets equally many micro-batches
        block = micro_batches[start : start + num_ranks]
        count = sum(index in usable for micro_batch in block for index in micro_batch)
        selected += block if count else []
        num_usable += count
        if num_usable >= MIN_KL_SEQUENCES:
            break
    new_logprobs_BT = score_micro_batches(policy, sequences, selected, data.mask_BT)
    rows = sorted(index for micro_batch in selected for index in micro_batch if index in usable)
    old_logprobs_BT = data.rollout_logprobs_BT if data.old_logprobs_BT is None else data.old_logprobs_BT
    mask_BT = data.mask_BT[rows]
    kl_BT = kl_estimate(old_logprobs_BT[rows], new_logprobs_BT[rows], "k3") * mask_BT
    kl, tokens = float(kl_BT.sum() / mask_BT.sum()), float(mask_BT.sum())
    if not math.isfinite(kl):
        raise NonFiniteUpdate(f"The KL divergence of the update is {kl}; the policy was not changed.")
    return {"guard/kl": kl, "guard/tokens": tokens}


def _summarize(name: str, values: Tensor) -> dict[str, float]:
    statistics = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": float(value) for statistic, value in statistics.items()}
