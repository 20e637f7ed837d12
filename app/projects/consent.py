"""Consent: may this turn be learned from? A no holds, whether the key (or its project) says it or the request."""

from collections.abc import Mapping

CONSENT = "attune_train"  # a pair of the request's metadata
NO_CONSENT = "no consent to train"


def withholds(pairs: Mapping[str, str]) -> bool:
    """Anything but "true" is a no: who writes "False" or "0" does not mean yes."""
    return pairs.get(CONSENT, "true") != "true"
