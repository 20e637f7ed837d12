"""Episodes with the policy's own sampling: what stock agents ask for is replaced, told and recorded, on every wire."""

from typing import Any

import httpx2
import pytest

from app.chat.sampling_override import POLICY_SAMPLING, override_sampling
from app.episodes.fingerprints import fingerprint_of
from app.episodes.schemas import EpisodeRequest
from app.inference.request import Sampling
from app.models import Sample, SampleState, Turn
from tests.support import episodes
from tests.support.deployment import Harness
from tests.support.scripted_engine import ScriptedEngine, logprob
from workers.curate import curate

HEADER = "x-attune-sampling"
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.9,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"5": 3},
}
ALL_REPLACED = "overridden; temperature=1; top_p=1; frequency_penalty=0; presence_penalty=0; logit_bias=none"
WIRES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": episodes.MESSAGES}, "overridden; temperature=1; top_p=1"),
    "responses": ("/v1/responses", {"input": "hi"}, "overridden; temperature=1; top_p=1"),
    "messages": (
        "/v1/messages",
        {"messages": episodes.MESSAGES, "max_tokens": 64, "top_k": 40},
        "overridden; temperature=1; top_p=1; top_k=-1",
    ),
}


async def send(harness: Harness, episode: dict[str, Any], wire: str, **fields: Any) -> httpx2.Response:
    path, body, _ = WIRES[wire]
    fields = {"model": "shop", "temperature": 0, "top_p": 0.5, **body, **fields}
    answer = await harness.api.post(path, json=fields, headers=episodes.auth(episode["api_key"]))
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_reply_is_sampled_from_the_policy_and_its_client_is_told(
    harness: Harness, scripted: ScriptedEngine, wire: str, stream: bool
) -> None:
    episode = await episodes.create(harness, sampling="policy")
    assert episode["sampling"] == "policy"
    answer = await send(harness, episode, wire, stream=stream)
    assert answer.headers[HEADER] == WIRES[wire][2]
    [turn] = await harness.all(Turn)
    assert turn.exclusion_reason is None
    assert {name: turn.sampling.get(name) for name in POLICY_SAMPLING} == POLICY_SAMPLING
    requested = {"temperature": 0.0, "top_p": 0.5} | ({"top_k": 40} if wire == "messages" else {})
    assert turn.request_params["overridden_sampling"] == requested
    [sent] = scripted.requests
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (1.0, 1.0, -1)
    prompt_ids, output_ids = await harness.prompt_ids(turn.id), turn.output_ids or []
    exact = [logprob(None, [*prompt_ids, *output_ids[:at]], token) for at, token in enumerate(output_ids)]
    assert turn.logprobs == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("wire", WIRES)
async def test_sampling_is_as_requested_unless_the_episode_says_otherwise(
    harness: Harness, scripted: ScriptedEngine, wire: str
) -> None:
    episode = await episodes.create(harness)
    assert episode["sampling"] == "request"
    answer = await send(harness, episode, wire)
    assert HEADER not in answer.headers
    [turn] = await harness.all(Turn)
    assert (turn.sampling["temperature"], turn.sampling["top_p"]) == (0.0, 0.5)
    assert turn.exclusion_reason is not None and "overridden_sampling" not in turn.request_params


async def test_greedy_agent_is_learned_from(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, sampling="policy")
    answer = await episodes.chat(harness, episode, **GREEDY)
    assert answer.headers[HEADER] == ALL_REPLACED
    assert HEADER not in (await episodes.chat(harness, episode)).headers, "nothing was replaced"
    await episodes.end(harness, episode["id"], outcome=1.0)
    await curate(harness.db, harness.settings)
    samples = await harness.all(Sample)
    assert [(sample.reward, sample.state) for sample in samples] == [(1.0, SampleState.OPEN)] * 2


async def test_other_parameters_hold_as_they_are(harness: Harness, scripted: ScriptedEngine) -> None:
    """Choices, seeds, stop texts and limits do not change the distribution; a grammar stays a reason for exclusion."""
    episode = await episodes.create(harness, sampling="policy")
    fields: dict[str, Any] = {"n": 2, "seed": 7, "stop": ["nine"], "max_tokens": 9, "temperature": 0}
    assert (await episodes.chat(harness, episode, **fields)).status_code == 200
    turns = await harness.all(Turn)
    assert sorted(turn.sampling["seed"] for turn in turns) == [7, 8]
    for turn in turns:
        assert (turn.sampling["stop"], turn.sampling["max_tokens"], turn.exclusion_reason) == (["nine"], 9, None)
        assert turn.request_params["overridden_sampling"] == {"temperature": 0.0}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    formatted = await episodes.chat(harness, episode, response_format=schema, temperature=0)
    assert formatted.headers[HEADER] == "overridden; temperature=1"
    assert "grammar" in ((await harness.get(Turn, formatted.json()["id"])).exclusion_reason or "")


async def test_background_task_is_sampled_as_requested(harness: Harness, scripted: ScriptedEngine) -> None:
    episode = await episodes.create(harness, sampling="policy")
    title = await episodes.chat(harness, episode, {"x-attune-task": "title"}, temperature=0)
    assert title.status_code == 200 and HEADER not in title.headers
    [turn] = await harness.all(Turn)
    assert (turn.origin, turn.sampling["temperature"]) == ("task", 0.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_response_names_what_its_reply_was_sampled_with(
    harness: Harness, scripted: ScriptedEngine, stream: bool
) -> None:
    episode = await episodes.create(harness, sampling="policy")
    answer = await send(harness, episode, "responses", stream=stream)
    if stream:
        assert '"temperature":1.0' in answer.text and '"temperature":0' not in answer.text
    else:
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (1.0, 1.0)
    [turn] = await harness.all(Turn)
    stored = await harness.api.get(f"/v1/responses/{turn.id.replace('chatcmpl-', 'resp_')}")
    assert stored.json()["temperature"] == 1.0


async def test_refused_request_is_told_too(harness: Harness, scripted: ScriptedEngine) -> None:
    scripted.refuse_status = 400
    answer = await episodes.chat(harness, await episodes.create(harness, sampling="policy"), temperature=0)
    assert answer.status_code == 400 and answer.headers[HEADER] == "overridden; temperature=1"


async def test_sampling_of_another_name_is_refused(harness: Harness) -> None:
    answer = await harness.api.post("/v1/episodes", json={"policy": "shop", "sampling": "greedy"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sampling")


def test_override_keeps_what_can_be_trained_on() -> None:
    sampling = Sampling(max_tokens=5, stop=("x",), seed=3)
    assert override_sampling(sampling) == (sampling, override_sampling(sampling)[1])
    assert override_sampling(sampling)[1].headers == {}


def test_request_that_an_earlier_release_recorded_has_the_same_fingerprint() -> None:
    """The same Idempotency-Key finds its episode after an upgrade: new fields count only where they are set."""
    request = EpisodeRequest(policy="shop", task="guess")
    recorded = "08e24cb0e71032208c3588db24dccaf03ed9a6d1eb9f0f96e60a1dd7012aa8aa"
    assert fingerprint_of(request) == recorded
    assert fingerprint_of(EpisodeRequest(policy="shop", task="guess", sampling="policy")) != recorded
