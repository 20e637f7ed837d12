"""Why a turn must not be trained on, as a code: the sentences are written where the reason is found."""

from enum import StrEnum

from app.models import ENGINE_REFUSED, LOST_REASON
from app.projects.service import NO_CONSENT


class ExclusionCode(StrEnum):
    """What kind of reason the sentence of `Turn.exclusion_reason` is."""

    NO_CONSENT = "no_consent"
    DELETED = "deleted"
    GREEDY = "greedy"  # not sampled
    SAMPLING_CHANGED = "sampling_changed"  # truncated, penalized or biased: the log-probs are not those of the sampling
    GRAMMAR = "grammar"
    REPEATED = "repeated"  # the client repeated the request
    CAPTURE_INCOMPLETE = "capture_incomplete"  # token ids, log-probs or the finish reason are missing or wrong
    WEIGHTS_CHANGED = "weights_changed"
    TOOL_CALLS_CUT = "tool_calls_cut"
    CLIENT_DISCONNECTED = "client_disconnected"
    SERVER_LOST = "server_lost"
    PROMPT_MISMATCH = "prompt_mismatch"
    REFUSED = "refused"  # the engine refused the request
    TASK = "task"  # a background task of a front end
    OTHER = "other"  # the engine's error, or why a rollout was not sampled


_BEGINNINGS = {
    NO_CONSENT: ExclusionCode.NO_CONSENT,
    "deleted": ExclusionCode.DELETED,
    "greedy decoding": ExclusionCode.GREEDY,
    "top-p or top-k": ExclusionCode.SAMPLING_CHANGED,
    "penalties changed": ExclusionCode.SAMPLING_CHANGED,
    "a logit bias": ExclusionCode.SAMPLING_CHANGED,
    "a grammar constrained": ExclusionCode.GRAMMAR,
    "its client repeated": ExclusionCode.REPEATED,
    "the reply has no finish reason": ExclusionCode.CAPTURE_INCOMPLETE,
    "the engine sent no token ids": ExclusionCode.CAPTURE_INCOMPLETE,
    "the engine's log-probs belong": ExclusionCode.CAPTURE_INCOMPLETE,
    "a log-prob is not": ExclusionCode.CAPTURE_INCOMPLETE,
    "the base weights changed": ExclusionCode.WEIGHTS_CHANGED,
    "the weights of": ExclusionCode.WEIGHTS_CHANGED,
    "the reply holds several tool calls": ExclusionCode.TOOL_CALLS_CUT,
    "client_disconnect": ExclusionCode.CLIENT_DISCONNECTED,
    LOST_REASON: ExclusionCode.SERVER_LOST,
    "its prompt ids differ": ExclusionCode.PROMPT_MISMATCH,
    ENGINE_REFUSED: ExclusionCode.REFUSED,
    "task: ": ExclusionCode.TASK,
}


def exclusion_code(reason: str) -> ExclusionCode:
    """Return the code of an exclusion reason. Example: "greedy decoding: the reply was not sampled" -> GREEDY"""
    if "output ids came with" in reason:
        return ExclusionCode.CAPTURE_INCOMPLETE
    codes = (code for beginning, code in _BEGINNINGS.items() if reason.startswith(beginning))
    return next(codes, ExclusionCode.OTHER)
