"""Digests of the requests of an episode, by which the same request again is known."""

import hashlib

import orjson

from app.episodes.schemas import EndRequest, EpisodeRequest

FIRST_FIELDS = ("policy", "task", "metadata", "limits")  # of EpisodeRequest, in the release that introduced it


def fingerprint_of(request: EpisodeRequest) -> str:
    """Return the digest of a request to create an episode. Fields that later releases added count where they are set:
    a request that an earlier release recorded has the same digest when it is repeated."""
    body, defaults = request.model_dump(mode="json"), EpisodeRequest(policy=request.policy).model_dump(mode="json")
    return _digest({name: value for name, value in body.items() if name in FIRST_FIELDS or value != defaults[name]})


def fingerprint_of_end(request: EndRequest) -> str:
    """Return the digest of a report of an episode's end."""
    return _digest(request.model_dump(mode="json"))


def _digest(value: dict[str, object]) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()
