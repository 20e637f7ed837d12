"""Predictions of votes by models that had not learned from them: the evidence by which a reward model is admitted.

A vote between two fits is predicted by the model of the earlier one, whether or not that was admitted, before the later
one learns from it; a held-out vote is predicted by the model that it was held out of. Each vote counts once. The
predictions are kept in the directory of each fit, by turn; the votes themselves are read from the newest dataset, so
that what people changed, withdrew or had erased does not count.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from alignment.reward_model.dataset import PreferenceDataset
from alignment.signals.ranking_accuracy import RankEvidence, RankStratum, rank_pairs, rank_votes


class Prediction(NamedTuple):
    """The score of a reply by the model of a fit. Scores of different fits are not comparable."""

    turn_id: str
    fit: str
    score: float


@dataclass(frozen=True)
class PreviousFit:
    """The fit before this one. `seen` are the turns of its dataset."""

    name: str
    directory: Path
    manifest_sha256: str
    seen: frozenset[str]

    def unseen(self, dataset: PreferenceDataset) -> list[int]:
        """Return the indices of the replies that were not in its dataset."""
        return [index for index, reply in enumerate(dataset.replies) if reply.turn_id not in self.seen]


def collect_evidence(dataset: PreferenceDataset, predictions: Iterable[Prediction]) -> RankEvidence:
    """Return how well the predictions order the replies of the dataset. Of a turn's predictions the last one counts."""
    index_of = {reply.turn_id: index for index, reply in enumerate(dataset.replies)}
    latest = {index_of[one.turn_id]: one for one in predictions if one.turn_id in index_of}
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for index, one in latest.items():
        scores[one.fit][index] = one.score
    return RankEvidence(tuple(stratum for fit in sorted(scores) for stratum in _rank(dataset, scores[fit])))


def _rank(dataset: PreferenceDataset, scores: Mapping[int, float]) -> Sequence[RankStratum]:
    votes = [(label.value, scores[label.reply]) for label in dataset.labels if label.reply in scores]
    pairs = [pair for pair in dataset.pairs if pair.chosen in scores and pair.rejected in scores]
    return [*rank_votes(votes), *rank_pairs(scores[pair.chosen] - scores[pair.rejected] for pair in pairs)]
