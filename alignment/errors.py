"""Errors that the alignment package raises.

AlignmentError
├── NoVariance          every reward of a batch is the same
├── SingletonGroup      a reward must be compared within its group, but the group has no other
├── NothingToCompare    a batch has no pair, or no group with different rewards
├── MisalignedSample    the tokens and log-probs of a sample do not match
├── ForeignSamples      the weights in question cannot have produced the recorded tokens or log-probs
├── DamagedAdapter      an adapter directory that must not reach an engine
├── NonFiniteUpdate     a loss or gradient is not finite
├── UnknownAlgorithm    no algorithm has the configured name
├── UnknownExtension    no function or class of another package has the configured name
└── UnavailableEnvironment  an environment of others cannot be opened
"""

from collections.abc import Mapping


class AlignmentError(ValueError):
    """Base class: the input cannot be processed."""


class NoVariance(AlignmentError):
    """All rewards are equal, so there is nothing to learn from."""


class SingletonGroup(AlignmentError):
    """A group has one reply only, so its reward has nothing to be compared with."""


class NothingToCompare(AlignmentError):
    """Replies that must be compared have equal rewards, or no counterpart."""


class ForeignSamples(AlignmentError):
    """The weights in question cannot have produced the samples.

    `turns` says why, by turn, if it is these turns and not the batch: it can be trained on without them.
    """

    def __init__(self, message: str, turns: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.turns = dict(turns or {})


class UnknownAlgorithm(AlignmentError):
    """Neither an import path nor an entry point of that name leads to an RLAlgorithm."""


class UnknownExtension(AlignmentError):
    """A name is neither built in, nor an entry point, nor importable."""


class UnavailableEnvironment(AlignmentError):
    """An environment of others cannot be opened: its interpreter, its package, its name or its arguments are wrong."""


class MisalignedSample(AlignmentError):
    """The prompt, output and log-probs of a sample do not match."""


class DamagedAdapter(AlignmentError):
    """Files or tensors of an adapter differ from its manifest or do not fit the base model."""


class NonFiniteUpdate(AlignmentError):
    """A loss, a gradient or the KL of the update is not finite. The policy is unchanged."""


class StepTooLarge(NonFiniteUpdate):
    """No fraction of an update has a KL within the target, so its learning rate is far too large."""
