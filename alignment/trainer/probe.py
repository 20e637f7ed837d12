"""The probe: fixed texts whose log-probs identify a version and show that an engine has loaded it correctly."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

PROBE_TEXTS = (
    "Hello! How can I help you today?",
    "What does it cost, and when will it be ready?",
    "The order was sent on Tuesday and should be with you by Friday.",
    "Thank you, that was very helpful. Goodbye!",
    "I am sorry, but I cannot find anything about that.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
)
MAX_TOKENS = 64


@dataclass(frozen=True)
class Probe:
    """The token ids of each text, and the log-prob at temperature 1, in nats, of each token but the first.

    Example: Probe(ids=((5, 9, 2),), logprobs=((-0.7, -2.1),))
    """

    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


def probe_ids(base_model: Path) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the probe texts; texts of fewer than two tokens are skipped."""
    tokenizer = AutoTokenizer.from_pretrained(base_model, local_files_only=True)
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"][:MAX_TOKENS] for text in PROBE_TEXTS)
    return tuple(tuple(ids) for ids in encoded if len(ids) > 1)
