"""A conversation as people see it: its turns in order, what was said about each, and what became of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from alignment.json_values import as_object, as_objects
from app.chat.histories import count_common, read_messages
from app.core.errors import NotFound
from app.feedback import queries
from app.feedback.feedback_rows import FeedbackBody
from app.models import Feedback, Origin, Policy, Reward, Sample, Turn, Version, to_completion_id
from app.policies.references import format_reference

MAX_TURNS = 100
MAX_FEEDBACK = 500


@dataclass(frozen=True)
class Line:
    """One message: its role and its text."""

    role: str
    text: str


@dataclass
class TurnStory:
    """A reply with what its prompt adds to the turn before, the feedback on it, its rewards and its sample."""

    turn: Turn
    version: str
    version_state: str
    question: list[Line]
    answered: Line | None
    feedback: list[FeedbackBody] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    sample: Sample | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.turn.finished_at is None else self.turn.finished_at - self.turn.created_at

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.turn.first_token_at is None else self.turn.first_token_at - self.turn.created_at


@dataclass(frozen=True)
class Conversation:
    id: str | None
    policy: str
    turns: list[TurnStory]
    feedback: list[FeedbackBody]  # about the conversation as a whole
    has_more: bool


def to_line(message: Mapping[str, object]) -> Line:
    """Return a message as text. Tool calls, and parts that are no text, are shown as JSON."""
    content = message.get("content")
    parts: list[object] = content if isinstance(content, list) else [content] if content else []
    texts = [_part_text(part) for part in parts]
    for call in as_objects(message.get("tool_calls") or []):
        function = as_object(call.get("function", {}))
        texts.append(f"{function.get('name', 'tool')}({function.get('arguments', '')})")
    return Line(str(message.get("role", "")), "\n".join(texts))


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    return str(part["text"]) if isinstance(part, dict) and "text" in part else orjson.dumps(part).decode()


async def read_conversation(session: AsyncSession, project_id: str, id: str) -> Conversation:
    """Return the first MAX_TURNS turns of a conversation. Raises NotFound."""
    in_conversation = (Turn.project_id == project_id, Turn.conversation_id == id, Turn.origin == Origin.CHAT)
    query = select(Turn).where(*in_conversation).order_by(Turn.created_at, Turn.id).limit(MAX_TURNS + 1)
    turns = list(await session.scalars(query))
    if not turns:
        raise NotFound(f"There is no conversation '{id}'.")
    return await _read_stories(session, project_id, id, turns)


async def read_turn(session: AsyncSession, project_id: str, id: str) -> Conversation:
    """Return a single turn, for a reply without a conversation. Raises NotFound."""
    turn = await session.scalar(select(Turn).where(Turn.project_id == project_id, Turn.id == id))
    if turn is None:
        raise NotFound(f"There is no reply '{id}'.")
    return await _read_stories(session, project_id, None, [turn])


async def _read_stories(session: AsyncSession, project_id: str, id: str | None, rows: Sequence[Turn]) -> Conversation:
    turns = rows[:MAX_TURNS]
    ids = [turn.id for turn in turns]
    existing = [turn.id for turn in turns if turn.deleted_at is None]
    messages = await read_messages(session, existing)
    is_version = Version.id.in_({turn.version_id for turn in turns})
    versions = {
        version.id: (format_reference(name, version.number), version.state)
        for version, name in await session.execute(
            select(Version, Policy.name).join(Policy, Policy.id == Version.policy_id).where(is_version)
        )
    }
    stories: dict[str, TurnStory] = {}
    seen: list[Mapping[str, object]] = []
    for turn in turns:
        prompt = messages.get(turn.id, [])
        common = count_common(seen, prompt)
        question = prompt[common:] if common == len(seen) else prompt
        if turn.choice_index > 0 and turn.completion_id == (stories and [*stories.values()][-1].turn.completion_id):
            question = []  # another reply to the prompt that is shown already
        name, state = versions[turn.version_id]
        answered = to_line(turn.reply) if turn.reply else None
        stories[turn.id] = TurnStory(turn, name, state, [to_line(message) for message in question], answered)
        seen = [*prompt, *([turn.reply] if turn.reply else [])]
    rewards = select(Reward).where(Reward.turn_id.in_(ids)).order_by(Reward.created_at, Reward.id)
    for reward in await session.scalars(rewards):
        stories[reward.turn_id].rewards.append(reward)
    for sample in await session.scalars(select(Sample).where(Sample.turn_id.in_(ids))):
        stories[sample.turn_id].sample = sample
    is_chat = turns[0].origin == Origin.CHAT  # nobody gives feedback on a rollout
    about = await _read_feedback(session, project_id, id, turns) if existing and is_chat else []
    of_turns: defaultdict[tuple[str | None, int | None], list[FeedbackBody]] = defaultdict(
        list, {(story.turn.completion_id, story.turn.choice_index): story.feedback for story in stories.values()}
    )
    for view in about:
        of_turns[view["completion_id"], view["choice_index"]].append(view)
    whole = [view for view in about if view["completion_id"] is None]
    policy = next(iter(versions.values()))[0].partition("@")[0]
    return Conversation(id, policy, list(stories.values()), whole, len(rows) > MAX_TURNS)


async def _read_feedback(
    session: AsyncSession, project_id: str, id: str | None, turns: Sequence[Turn]
) -> list[FeedbackBody]:
    completion_id = None if id is not None else turns[0].completion_id
    query = await queries.select_feedback(session, project_id, completion_id, None, id)
    page = await queries.list_page(session, project_id, query, after=None, limit=MAX_FEEDBACK, newest_first=False)
    return page["data"]


async def find_turn(session: AsyncSession, project_id: str, id: str) -> Turn | None:
    """Return the turn that an id belongs to: of a completion, a request, a response, a turn, or of feedback."""
    of_project = select(Turn).where(Turn.project_id == project_id)
    turn = await session.scalar(of_project.where(Turn.id == to_completion_id(id)))
    if turn is None:
        rated = select(Feedback.turn_id).where(Feedback.project_id == project_id, Feedback.id == id)
        turn = await session.scalar(of_project.where(Turn.id.in_(rated)))
    return turn


async def conversation_exists(session: AsyncSession, project_id: str, id: str) -> bool:
    is_turn = (Turn.project_id == project_id, Turn.conversation_id == id)
    return await session.scalar(select(Turn.id).where(*is_turn).limit(1)) is not None
