"""Dialogues with simulated users, the real API and a scripted engine: rewards, records, what is learned from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

import pytest

from alignment.environments.attempts import Attempt, ChatEndpoint, derive_seed
from alignment.environments.environment_run import EnvironmentRun
from alignment.environments.episode_loop import LoopEnvironment
from alignment.environments.errors import ServiceRefusal
from alignment.environments.open_environment import open_environment
from alignment.environments.protocols import Agent, Feedback, Limits, Message, Observation, Outcome, Task
from alignment.environments.service_http import ServiceHttp
from alignment.environments.tools.function_tool import FunctionTool
from alignment.environments.tools.toolbox import Toolbox
from alignment.environments.users.model_user import ModelUser
from alignment.environments.users.scripted_user import ScriptedUser
from alignment.environments.users.simulated_user import SimulatedUser
from alignment.environments.users.user_interaction import UserInteraction
from alignment.environments.worlds import InteractionWorld
from alignment.errors import UnavailableEnvironment
from app.models import Episode, Sample, Turn
from examples.table_booking import TableBooking
from tests.docs.blocks import blocks
from tests.support.deployment import Harness
from tests.support.environments import PLAN, Faulty, open_run
from tests.support.scripted_engine import ScriptedEngine
from workers.curate import curate

BOOKING = "examples.table_booking:TableBooking"
CALL = ("book_table", '{"day": "%(day)s", "people": %(people)s, "name": "%(name)s"}')
TASK = next(TableBooking().tasks("train", 0))
QUESTIONS = (
    "On which day should the table be booked?",
    "I have not booked it yet. How many people?",
    "We are fully booked. Another day?",
    "Under which name shall I have it reserved?",
    "Anything else?",
    "It is booked.",
)


def answer_as_either(body: dict[str, Any]) -> str:
    """Reply as the guest, whose persona begins with "You are", or as the assistant, who books the table in the end."""
    messages = body["messages"]
    if not messages[0]["content"].startswith("You are"):
        return "It is booked." if messages[-1]["role"] == "tool" else "For how many?"
    has_table = messages[-1]["content"] == "It is booked."
    return "###STOP###" if has_table else f"I am guest {body['seed']}, message {len(messages)}."


@pytest.fixture
def talking(scripted: ScriptedEngine) -> ScriptedEngine:
    scripted.reply_to = answer_as_either
    scripted.tool_call, scripted.answers_results = (CALL[0], CALL[1] % TASK.data), True
    return scripted


async def play(harness: Harness, url: str, arguments: dict[str, str], **changes: Any) -> EnvironmentRun:
    environment = open_environment(BOOKING, {**arguments})
    async with open_run(environment, url, harness.key, replace(PLAN, **changes)) as run:
        await run.run()
    return run


@pytest.mark.usefixtures("talking")
async def test_attempt_with_a_scripted_user(harness: Harness, live_url: str) -> None:
    run = await play(harness, live_url, {})
    assert run.summary().ends == {"completed": 1} and run.summary().mean_reward == 1.0
    assert run.summary().users == {"scripted": 1}
    turns = await harness.all(Turn)
    assert [turn.origin for turn in turns] == ["chat", "chat"], "a script needs no model"
    [episode] = await harness.all(Episode)
    assert episode.request_metadata["user"] == "scripted"


async def test_words_of_a_booking_end_no_dialogue(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    questions = iter(QUESTIONS)
    scripted.reply_to = lambda body: next(questions)
    run = await play(harness, live_url, {}, limits=Limits(max_turns=len(QUESTIONS)))
    assert run.summary().ends == {"max_turns": 1} and run.summary().mean_reward == -1.0, "nothing is booked"
    texts = [message["content"] for message in scripted.requests[-1]["messages"] if message["role"] == "user"]
    day, people, name = (TASK.data[key] for key in ("day", "people", "name"))
    answers = [f"On {day}.", f"We are {people}.", f"On {day}.", f"{name}, please.", "Can you book it, please?"]
    assert texts == ["Hello, I would like to book a table.", *answers]


async def test_wrong_booking_is_worth_less(harness: Harness, live_url: str, talking: ScriptedEngine) -> None:
    talking.tool_call = (CALL[0], CALL[1] % {**TASK.data, "people": 99})
    run = await play(harness, live_url, {})
    assert run.summary().mean_reward == pytest.approx(1 / 3)


async def test_dialogue_without_an_end_is_ended(harness: Harness, live_url: str, scripted: ScriptedEngine) -> None:
    scripted.reply_text = "Pardon?"
    run = await play(harness, live_url, {})
    assert run.summary().num_turns == TableBooking.max_turns and run.summary().ends == {"max_turns": 1}


@pytest.mark.usefixtures("talking")
async def test_attempt_with_a_model_as_the_user(harness: Harness, live_url: str) -> None:
    run = await play(harness, live_url, {"user_model": "shop@v0"})
    summary = run.summary()
    assert summary.ends == {"completed": 1} and summary.mean_reward == 1.0
    assert summary.users == {"model shop@v0, hurried guest": 1}
    assert summary.num_turns == 2, "the chats of the agent alone"
    [episode] = await harness.all(Episode)
    seed = derive_seed(0, TASK.id, 0)
    assert episode.request_metadata["user"] == "model shop@v0, hurried guest"
    assert episode.request_metadata["user_seed"] == str(seed)
    assert len(episode.request_metadata["user_sha256"]) == 16
    chats = [turn for turn in await harness.all(Turn) if turn.origin == "task"]
    assert [turn.sampling["seed"] for turn in chats] == [derive_seed(seed, 0), derive_seed(seed, 1)]
    assert {turn.request_metadata["simulated-user-of"] for turn in chats} == {episode.id}
    assert {turn.request_params["service_tier"] for turn in chats} == {"flex"}
    metadata = {"metadata[simulated-user-of]": episode.id}
    listed = (await harness.api.get("/v1/chat/completions", params=metadata)).json()["data"]
    assert {row["id"] for row in listed} == {turn.id for turn in chats}, "the record of what the user wrote"
    assert {row["model"] for row in listed} == {"shop@v0"}


@pytest.mark.usefixtures("talking")
async def test_no_message_of_the_user_becomes_a_sample(harness: Harness, live_url: str) -> None:
    await play(harness, live_url, {"user_model": "shop@v0"}, num_tasks=1, group_size=2)
    turns = await harness.all(Turn)
    of_user = {turn.id for turn in turns if turn.origin == "task"}
    of_agent = {turn.id for turn in turns} - of_user
    assert len(of_user) == len(of_agent) == 4
    vote = (await harness.vote(min(of_user), source="ada")).json()
    assert (vote["trainable"], vote["exclusion_reason"]) == (False, "task: simulated_user")
    await curate(harness.db, harness.settings)
    samples = {sample.turn_id: sample.state for sample in await harness.all(Sample)}
    assert samples.pop(min(of_user)) == "dropped", "somebody has voted on it"
    assert samples.keys() == of_agent
    hidden = (await harness.api.get("/v1/turns", params={"origin": "task"})).json()["data"]
    assert {turn["id"] for turn in hidden} == of_user
    assert {turn["exclusion"]["reason"] for turn in hidden} == {"task: simulated_user"}
    assert {turn["episode_id"] for turn in hidden} == {None}
    assert {turn["id"] for turn in (await harness.api.get("/v1/turns")).json()["data"]} == of_agent
    for episode in await harness.all(Episode):
        shown = (await harness.api.get(f"/v1/episodes/{episode.id}")).json()["turns"]
        assert {turn["id"] for turn in shown} <= of_agent and len(shown) == 2


def contents(requests: list[dict[str, Any]]) -> list[list[str]]:
    return [[message["content"] for message in request["messages"]] for request in requests]


async def test_same_seed_is_the_same_dialogue(harness: Harness, live_url: str, talking: ScriptedEngine) -> None:
    dialogues = []
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        talking.requests.clear()
        await play(harness, live_url, {"user_model": "shop@v0"}, name=name, seed=seed, group_size=2, concurrency=1)
        dialogues.append(contents(talking.requests))
    assert dialogues[0] == dialogues[1] != dialogues[2]
    firsts = {messages[1] for messages in dialogues[0] if messages[0].startswith("You take bookings")}
    assert len(firsts) == 2, "the attempts of a group have users of their own"


@pytest.mark.usefixtures("talking")
async def test_run_does_not_go_on_with_another_user(harness: Harness, live_url: str) -> None:
    await play(harness, live_url, {})
    run = await play(harness, live_url, {})
    assert run.summary().is_complete and run.summary().num_attempts == 0
    with pytest.raises(ServiceRefusal, match="was begun with another description of its attempts, such as another sim"):
        await play(harness, live_url, {"user_model": "shop@v0"})


async def test_user_whose_engine_is_down_is_no_low_reward(
    harness: Harness, live_url: str, talking: ScriptedEngine
) -> None:
    talking.refuse_status = 500
    environment = LoopEnvironment(lambda: InteractionWorld(TableBooking("shop@v0")), ServiceHttp(patience=0.0))
    async with open_run(environment, live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2} and summary.mean_reward is None
    [message] = summary.errors
    assert message.startswith("InfrastructureFailure: the simulated user, shop@v0: the service is busy")


@pytest.mark.parametrize(("model", "num_episodes"), [("shop", 0), ("shop@v9", 1)])
async def test_model_that_cannot_be_the_user_ends_the_run(
    harness: Harness, live_url: str, talking: ScriptedEngine, model: str, num_episodes: int
) -> None:
    with pytest.raises(UnavailableEnvironment, match="simulated user"):
        await play(harness, live_url, {"user_model": model})
    episodes = await harness.all(Episode)
    assert [row.end_reason for row in episodes] == ["abandoned"] * num_episodes


@dataclass
class OwnLoop(Faulty):
    """It chats with the agent once, and lets a model begin as the user."""

    endpoint: ChatEndpoint | None = None
    seeds: list[int] = field(default_factory=list)

    def use_service(self, endpoint: ChatEndpoint) -> None:
        self.endpoint = endpoint

    async def describe_attempt(self, task: Task, seed: int) -> Mapping[str, str]:
        return {**ModelUser("You are Ada.", "shop@v0").describe(), "user_seed": str(seed)}

    async def run(self, task: Task, agent: Agent) -> Outcome:
        self.seeds.append(agent.seed)
        user = ModelUser("You are Ada.", "shop@v0")
        await user.begin(Attempt(agent.seed, agent.episode_id, self.endpoint))
        await user.close()
        return await super().run(task, agent)


@pytest.mark.usefixtures("scripted")
async def test_environment_with_its_own_loop_has_a_user_too(harness: Harness, live_url: str) -> None:
    environment = OwnLoop(["raise"])
    async with open_run(environment, live_url, harness.key, replace(PLAN, group_size=2, concurrency=1)) as run:
        summary = await run.run()
    assert summary.users == {"model shop@v0": 3} and summary.num_turns == 3
    first, second = (derive_seed(0, "train-0", number) for number in range(2))
    assert environment.seeds == [first, first, second], "an attempt that is repeated has the same user"
    seeds = [row.request_metadata["user_seed"] for row in await harness.all(Episode)]
    assert seeds == [str(first), str(first), str(second)]
    origins = [turn.origin for turn in await harness.all(Turn)]
    assert origins == ["task", "chat"] * 3
    assert environment.endpoint is not None and environment.endpoint.http is not None, "with the run's certificates"


def look_up(order: str) -> str:
    """Look up an order.

    Args:
        order: Its number.
    """
    return "sent"


class Orders(UserInteraction):
    """A dialogue with a tool. It notes what is graded, and what becomes of its users."""

    max_turns = 3
    dialogues: ClassVar[list[list[Message]]] = []
    closed: ClassVar[list[str]] = []

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        yield Task("without-order")
        yield Task("4711", {"order": "4711"})

    def user(self, task: Task) -> SimulatedUser:
        return ClosingUser(f"Where is {task.data['order']}?", otherwise="And now?")

    def observe(self, task: Task, first: Message) -> Observation:
        return Observation([first], toolbox=Toolbox([FunctionTool(look_up)]))

    async def grade(self, task: Task, dialogue: Sequence[Message]) -> float:
        self.dialogues.append(list(dialogue))
        return 0.5


class ClosingUser(ScriptedUser):
    async def close(self) -> None:
        Orders.closed.append("closed")


@pytest.fixture
def orders() -> type[Orders]:
    Orders.dialogues.clear()
    Orders.closed.clear()
    return Orders


class OneOrder(Orders):
    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return islice(super().tasks(split, seed), 1, None)


async def test_agent_that_never_answers_is_graded(
    harness: Harness, live_url: str, scripted: ScriptedEngine, orders: type[Orders]
) -> None:
    scripted.tool_call = ("look_up", '{"order": "4711"}')
    environment = LoopEnvironment(lambda: InteractionWorld(OneOrder()))
    async with open_run(environment, live_url, harness.key, replace(PLAN, limits=Limits(max_turns=3))) as run:
        summary = await run.run()
    assert summary.ends == {"max_turns": 1}
    [dialogue] = orders.dialogues
    assert [message["role"] for message in dialogue] == ["user", *["assistant", "tool"] * 3]


async def test_grade_has_what_comes_after_the_last_answer(
    harness: Harness, live_url: str, scripted: ScriptedEngine, orders: type[Orders]
) -> None:
    class CallsAfterAnswer(OneOrder):
        async def respond(self, messages: Sequence[Message]) -> Feedback:
            scripted.tool_call = ("look_up", '{"order": "4711"}')
            return await super().respond(messages)

    environment = LoopEnvironment(lambda: InteractionWorld(CallsAfterAnswer()))
    async with open_run(environment, live_url, harness.key, replace(PLAN, limits=Limits(max_turns=3))) as run:
        await run.run()
    [dialogue] = orders.dialogues
    roles = [message["role"] for message in dialogue]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "tool"]
    assert dialogue[2]["content"] == "And now?" and dialogue[4]["content"] == "sent"


@pytest.mark.usefixtures("scripted")
async def test_limit_of_the_dialogue_is_a_limit(harness: Harness, live_url: str, orders: type[Orders]) -> None:
    environment = LoopEnvironment(lambda: InteractionWorld(OneOrder()))
    async with open_run(environment, live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"max_turns": 1} and summary.num_turns == Orders.max_turns
    assert orders.dialogues[0][-1]["role"] == "assistant", "what the agent has not seen is left out"
    [episode] = await harness.all(Episode)
    assert (episode.end_reason, episode.outcome) == ("max_turns", 0.5)
    assert orders.closed == ["closed"] * 3, "those of the descriptions, too: of the run, and of the attempt"


@pytest.mark.usefixtures("scripted")
async def test_task_without_a_user_is_lost_alone(harness: Harness, live_url: str, orders: type[Orders]) -> None:
    environment = LoopEnvironment(lambda: InteractionWorld(Orders()))
    async with open_run(environment, live_url, harness.key, replace(PLAN, num_tasks=2)) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2, "max_turns": 1}
    assert summary.planned is not None and summary.planned.lost == 1
    [message] = summary.errors
    assert re.fullmatch(r"KeyError: 'order' \(test_user_interaction\.py:\d+ in user\)", message)
    lost = [result for result in run.results if result.is_lost]
    assert {result.task for result in lost} == {"without-order"} and lost[0].traceback is not None
    assert [row.task for row in await harness.all(Episode)] == ["4711"]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("description", ["rooms", {"rooms": 3}, {"rooms": "3" * 513}, dict.fromkeys("abcdefghi", "")])
async def test_description_that_is_no_metadata_is_the_environments_mistake(
    harness: Harness, live_url: str, description: Any
) -> None:
    class Describing(Faulty):
        async def describe_attempt(self, task: Task, seed: int) -> Any:
            return description

        def describe(self) -> str:
            return "what another class has under this name is not recorded"

    async with open_run(Describing([]), live_url, harness.key) as run:
        summary = await run.run()
    assert summary.ends == {"infrastructure": 2}
    [message] = summary.errors
    assert message.startswith("ValueError: describe_attempt must return")


async def test_example_of_the_documentation_takes_each_end() -> None:
    [block] = [block.text for block in blocks("python") if "class Refunds" in block.text]
    names: dict[str, Any] = {}
    exec(block, names)
    refunds = names["Refunds"]()
    [task] = refunds.tasks("train", 0)
    for reply, is_over, reward in (
        ("Order 4711 cannot be refunded.", False, -1.0),
        ("Which order should be refunded?", False, -1.0),
        ("I have refunded order 4711.", True, 1.0),
    ):
        messages: list[Message] = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": reply}]
        assert (await refunds.user(task).reply(messages) is None) is is_over
        assert await refunds.grade(task, messages) == reward
    call: Message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call-1"}]}
    for dialogue in ([], messages[:1], [*messages[:1], call]):
        assert await refunds.grade(task, dialogue) == -1.0
