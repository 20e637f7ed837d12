"""The reasons of the outcomes of feedback: their order, the state that each gives, and what people read of it."""

from enum import StrEnum

from alignment.corrected_text import TextRule
from app.feedback.schemas import OutcomeState
from app.models import SampleRule


class Reason(StrEnum):
    """Why feedback has its outcome. Of feedback about several replies the reply with the first of these decides."""

    LEARNED = "learned"
    RELEASE = "release"
    UNDONE = "undone"
    TRAINING = "training"
    SCORE_IN_TRAINING = "score_in_training"
    BATCH = "batch"
    NEW_FEEDBACK = "new_feedback"
    RESUME = "resume"
    CONSENT = "consent"
    OTHER_SOURCES = "other_sources"
    ADMIN_REVIEW = "admin_review"
    EPISODE_GROUP = "episode_group"
    EPISODE_OPEN = "episode_open"
    REPLY_UNFINISHED = "reply_unfinished"
    PROCESSING = "processing"
    ROLLED_BACK = SampleRule.ROLLED_BACK
    VERSION_REJECTED = SampleRule.VERSION_REJECTED
    TOO_LATE = "too_late"
    TOO_OLD = SampleRule.TOO_OLD
    NOTHING_TO_COMPARE = SampleRule.NOTHING_TO_COMPARE
    UNTRAINABLE = SampleRule.UNTRAINABLE
    RATER_BLOCKED = SampleRule.RATER_BLOCKED
    EXCLUDED = SampleRule.EXCLUDED
    OFF_PATH = SampleRule.OFF_PATH
    ATTEMPT_LOST = SampleRule.ATTEMPT_LOST
    ERASED = SampleRule.ERASED
    WITHDRAWN = SampleRule.WITHDRAWN
    REPLACED = "replaced"
    NOT_USED = "not_used"
    NO_REWARD = "no_reward"
    UNPROCESSABLE = "unprocessable"


REASONS = tuple(Reason)
CODES = {reason: code for code, reason in enumerate(REASONS)}  # statements compare them: the lowest is the outcome
WAITING = REASONS[CODES[Reason.RELEASE] : CODES[Reason.ROLLED_BACK]]
SENTENCES = {
    Reason.LEARNED: "A released version has learned from it.",
    Reason.RELEASE: "An update has learned from it; its version is not released yet.",
    Reason.UNDONE: "The version that learned from it was undone; its sample returns within seconds or minutes.",
    Reason.TRAINING: "It is in the batch that is being trained, or that is trained next.",
    Reason.SCORE_IN_TRAINING: "An update is learning from the score of its reply; the next one learns from it instead.",
    Reason.BATCH: "It is ready and waits for the next batch.",
    Reason.NEW_FEEDBACK: "It was in a batch before, and joins the next one only together with newer feedback.",
    Reason.RESUME: "It is ready; learning is halted until an operator resumes it.",
    Reason.CONSENT: "It waits until its project or API key consents to training again.",
    Reason.OTHER_SOURCES: "It waits for the other reward sources of its reply.",
    Reason.ADMIN_REVIEW: "Its sample is quarantined and waits for an admin's decision.",
    Reason.EPISODE_GROUP: "It waits for the other attempts of its episode's group.",
    Reason.EPISODE_OPEN: "Its episode has not ended yet.",
    Reason.REPLY_UNFINISHED: "Its reply has not ended yet.",
    Reason.PROCESSING: "It has not been processed yet.",
    Reason.ROLLED_BACK: "The version that learned from it was rolled back.",
    Reason.VERSION_REJECTED: "The version that learned from it was rejected.",
    Reason.TOO_LATE: "Its reply was already in a batch when it was processed.",
    Reason.TOO_OLD: "Its reply is older than the settings allow, or its version is too far behind.",
    Reason.NOTHING_TO_COMPARE: "The algorithm compares replies to one prompt, or the attempts of a group, and there "
    "was no other one.",
    Reason.UNTRAINABLE: "No batch with its reply could be trained.",
    Reason.RATER_BLOCKED: "An admin has blocked its rater.",
    Reason.EXCLUDED: "Its reply must not be trained on.",
    Reason.OFF_PATH: "The attempts of its group are compared, and its episode did not go on from its reply.",
    Reason.ATTEMPT_LOST: "Its episode was abandoned and no person judged it, or its infrastructure failed.",
    Reason.ERASED: "Its reply was deleted.",
    Reason.WITHDRAWN: "It was withdrawn.",
    Reason.REPLACED: "Later feedback of the same source replaced it.",
    Reason.NOT_USED: "The reward of its reply comes from other sources alone.",
    Reason.NO_REWARD: "Feedback of its kind gives no reward under the policy's reward settings.",
    Reason.UNPROCESSABLE: "Its processing failed; the audit log has the error (feedback.skipped).",
}
TEXT_SENTENCES: dict[str | None, str] = {
    TextRule.WHOLE_CONVERSATION: " Its text is not learned from: it corrects a whole conversation, not one reply.",
    TextRule.NOT_TEXT: " Its text is not learned from: the reply has no text, or calls tools.",
    TextRule.SAME_TEXT: " Its text is not learned from: it is that of the reply.",
    TextRule.TOO_LONG: " Its text is not learned from: it is too long beside the reply, or for the model.",
    TextRule.SPECIAL_TOKENS: " Its text is not learned from: it has marks of the chat template.",
    TextRule.OTHER_TOKENS: " Its text is not learned from: the reply's text does not match its recorded tokens.",
    TextRule.TOO_MANY: " Its text is not learned from: the reply has too many corrections.",
}


def state_of(reason: Reason) -> OutcomeState:
    """Return the state of the outcomes with this reason."""
    if reason == Reason.LEARNED:
        return "learned"
    return "waiting" if reason in WAITING else "not_learned"


def write_sentence(reason: Reason, version: str | None, sample_reason: str | None) -> str:
    """Return the sentence of an outcome: of the version that has learned, or why the sample is as it is, if known."""
    sentence = SENTENCES[reason]
    if version is not None and reason in (Reason.LEARNED, Reason.RELEASE):
        return {
            Reason.LEARNED: f"{version} has learned from it.",
            Reason.RELEASE: f"{version} has learned from it and is not released yet.",
        }[reason]
    if reason in (Reason.EXCLUDED, Reason.UNTRAINABLE, Reason.ADMIN_REVIEW) and sample_reason:
        return f"{sentence.removesuffix('.')}: {sample_reason.removesuffix('.')}."
    return sentence
