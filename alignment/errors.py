"""Everything the workshop refuses, and why.

AlignmentError
├── NoVariance          every reward of a batch is the same
├── SingletonGroup      a reward that is to be compared within a group, and is alone in it
├── NothingToCompare    a batch that has no pair, or no group with a difference in it
├── MisalignedSample    a turn that is not exactly the tokens and log-probs the engine gave
├── ForeignSamples      recorded log-probs that the weights they are said to come from cannot have given
├── DamagedAdapter      an adapter directory that must not reach an engine
├── NonFiniteUpdate     a loss or gradient that is not a number
└── UnknownAlgorithm    an algorithm's name that leads to no algorithm
"""


class AlignmentError(ValueError):
    """The workshop cannot go on with what it was given."""


class NoVariance(AlignmentError):
    """All rewards are equal, so there is nothing to prefer and nothing to learn."""


class SingletonGroup(AlignmentError):
    """A group of one has no mean but its own: nothing can be said about its reply."""


class NothingToCompare(AlignmentError):
    """Replies that are to be compared do not differ in reward, or have nothing to be compared with."""


class ForeignSamples(AlignmentError):
    """Recorded log-probs are too far from those of the weights that the samples are said to come from."""


class UnknownAlgorithm(AlignmentError):
    """Neither a dotted path nor an entry point of that name leads to an RLAlgorithm."""


class MisalignedSample(AlignmentError):
    """Prompt, output and log-probs of a sample do not belong together."""


class DamagedAdapter(AlignmentError):
    """Files or tensors of an adapter are not what was sealed or what the base model takes."""


class NonFiniteUpdate(AlignmentError):
    """The update met a loss or gradient that is not finite; the policy stays as it was."""
