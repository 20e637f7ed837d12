"""Everything the workshop refuses, and why.

AlignmentError
├── NoVariance          every reward of a batch is the same
├── MisalignedSample    a turn that is not exactly the tokens and log-probs the engine gave
├── DamagedAdapter      an adapter directory that must not reach an engine
└── NonFiniteUpdate     a loss or gradient that is not a number
"""


class AlignmentError(ValueError):
    """The workshop cannot go on with what it was given."""


class NoVariance(AlignmentError):
    """All rewards are equal, so there is nothing to prefer and nothing to learn."""


class MisalignedSample(AlignmentError):
    """Prompt, output and log-probs of a sample do not belong together."""


class DamagedAdapter(AlignmentError):
    """Files or tensors of an adapter are not what was sealed or what the base model takes."""


class NonFiniteUpdate(AlignmentError):
    """The update met a loss or gradient that is not finite; the policy stays as it was."""
