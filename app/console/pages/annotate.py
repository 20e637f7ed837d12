"""Annotate: label replies one after another; the labels are feedback that learning uses."""

from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from app.chat.histories import read_messages
from app.console import annotation
from app.console.access import Annotator, Operator, Visit, form_body
from app.console.annotation import KINDS, Kind, source_id
from app.console.conversations import to_line
from app.console.pages.overview import PolicyQuery
from app.console.rendering import redirect, render_page
from app.core.errors import BadRequest, Forbidden
from app.core.http import StrictModel, services_of
from app.feedback import service
from app.feedback.feedback_writer import FeedbackWriter
from app.feedback.queries import get_feedback
from app.models import RaterStanding, SourceKind, new_id
from app.raters import service as raters
from app.raters.names import feedback_rater

router = APIRouter()
PATH = "/console/annotate"
MAX_SKIPPED = 40
TAKEN_BACK = "Not saved: this label was taken back before. Label the reply anew when it comes again."
Text = Annotated[str, Field(max_length=100_000)]


class Label(StrictModel):
    """What a person says about a reply, or about two: which one is better."""

    policy: str
    kind: Kind
    once: Annotated[str, Field(min_length=8, max_length=48, description="made with the page: a retry counts once")]
    turn: Annotated[str, Field(max_length=60, description="completion id and choice, such as chatcmpl-9f2c…/1")]
    other: Annotated[str | None, Field(max_length=60)] = None
    vote: Literal["up", "down", "first", "second", "equal"] | None = None
    correction: Text | None = None
    comment: Annotated[str | None, Field(max_length=10_000)] = None
    original: Text | None = None


class Undo(StrictModel):
    policy: str
    kind: Kind
    ids: Annotated[str, Field(max_length=200)]


class TrustAct(StrictModel):
    policy: str
    reason: Annotated[str, Field(max_length=1000)]


@router.get("/annotate")
async def show_item(
    visit: Annotator,
    policy: PolicyQuery = None,
    kind: Kind = "single",
    skip: Annotated[str, Query(max_length=2000)] = "",
    last: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Show the next reply of the person's queue, with the conversation before it."""
    chosen, names = await visit.choose_policy(policy)
    skipped = [id for id in skip.split(",") if id][-MAX_SKIPPED:]
    async with visit.db.read() as session:
        item = await annotation.next_item(session, visit.caller, chosen, kind, skipped)
        first = item.turns[0].id if item else ""
        prompt = (await read_messages(session, [first])).get(first, []) if item else []
        standing = await annotation.find_standing(session, visit.caller)
    return await render_page(
        visit,
        "annotate.html",
        "Annotate",
        policy=chosen,
        policies=names,
        kind=kind,
        kinds=KINDS,
        item=item,
        prompt=[to_line(message) for message in prompt],
        replies=[to_line(turn.reply).text if turn.reply else "" for turn in item.turns] if item else [],
        once=new_id("ann"),
        skip=",".join([*skipped, first]),
        last=last,
        standing=standing,
        learns_corrections=annotation.corrections_are_learned_from(chosen, visit.settings),
        rater=feedback_rater(SourceKind.HUMAN, source_id(visit.caller)),
    )


@router.post("/annotate")
async def save(visit: Annotator, label: Annotated[Label, form_body(Label)]) -> Response:
    """Write the label as feedback: a thumb, a correction, or a comparison of two replies."""
    bodies = list(build_feedback(label, source_id(visit.caller)))
    if not bodies:
        raise BadRequest("Vote, or rewrite the reply, before you save. Skip passes over it.", param="vote")
    writer = services_of(visit.request).get(FeedbackWriter)
    results = [await service.submit(visit.db, writer, visit.caller, body, header_key=None) for body in bodies]
    if any(result.view.get("withdrawn") for result in results):  # of a page from before, sent again
        return await _go_on(visit, label.policy, label.kind, TAKEN_BACK)
    ids = [str(result.view["id"]) for result in results]
    return await _go_on(visit, label.policy, label.kind, "Saved.", last=",".join(ids))


def build_feedback(label: Label, source: str) -> list[dict[str, object]]:
    """Return the bodies of POST /v1/feedback that the label becomes. Raises BadRequest for a vote of the wrong kind."""
    shared = {"source": {"kind": SourceKind.HUMAN, "id": source}, "metadata": {"given_in": "console"}}
    comment = {} if label.comment is None else {"comment": label.comment}
    target = _parse_target(label.turn)
    if label.kind == "pair":
        if label.other is None or label.vote not in ("first", "second", "equal"):
            raise BadRequest("Say which of the two replies is better, or that they are equal.", param="vote")
        pair = [target, _parse_target(label.other)]
        orders: dict[str, list[Any]] = {"first": pair, "second": pair[::-1], "equal": [pair]}
        return [{"id": label.once, "kind": "comparison", "value": orders[label.vote], **shared, **comment}]
    if label.vote not in (None, "up", "down"):
        raise BadRequest("A single reply is voted up or down.", param="vote")
    bodies: list[dict[str, object]] = []
    rewritten = (label.correction or "").strip()
    if label.original is not None and rewritten in ("", label.original.strip()):
        raise BadRequest("Change the text first; a vote alone needs no other text.", param="correction")
    if label.vote is not None:
        bodies.append({"id": label.once, "kind": "binary", "value": label.vote, **target, **shared, **comment})
    if rewritten:
        bodies.append({"id": f"{label.once}-c", "kind": "correction", "value": rewritten, **target, **shared})
    return bodies


def _parse_target(text: str) -> dict[str, object]:
    """Example: "chatcmpl-9f2c/1" -> {"completion_id": "chatcmpl-9f2c", "choice_index": 1}"""
    completion_id, _, choice = text.partition("/")
    if not choice.isdecimal():
        raise BadRequest("The form names no reply.", param="turn")
    return {"completion_id": completion_id, "choice_index": int(choice)}


@router.post("/annotate/undo")
async def undo(visit: Annotator, act: Annotated[Undo, form_body(Undo)]) -> Response:
    """Withdraw the labels that were saved last. Raises Forbidden for those of somebody else."""
    async with visit.db.write() as session:
        for id in act.ids.split(","):
            row = await get_feedback(session, visit.caller.project_id, id)
            if row["source_id"] != source_id(visit.caller):
                raise Forbidden("You can take back your own labels only.")
            await service.withdraw(session, visit.caller.project_id, id, actor=visit.caller.key_prefix)
    return await _go_on(visit, act.policy, act.kind, "Taken back.")


@router.post("/annotate/trust")
async def trust(visit: Operator, act: Annotated[TrustAct, form_body(TrustAct)]) -> Response:
    """Trust the labels of this session's key: they are not held as a flood, and no cap per rater applies to them."""
    name = feedback_rater(SourceKind.HUMAN, source_id(visit.caller))
    change = (visit.caller.project_id, name, RaterStanding.TRUSTED, act.reason)
    await visit.db.with_long_timeout.retry_on_deadlock(
        lambda session: raters.set_standing(session, *change, actor=visit.caller.key_prefix)
    )
    return await _go_on(visit, act.policy, "single", "Your labels are trusted from now on.")


async def _go_on(visit: Visit, policy: str, kind: Kind, notice: str, last: str = "") -> Response:
    query = {"policy": policy, "kind": kind} | ({"last": last} if last else {})
    return await redirect(visit, f"{PATH}?{urlencode(query)}", notice)
