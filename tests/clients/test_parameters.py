"""What each parameter of a chat does to the reply, on the real engine. `docs/conformance.md` names these tests."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.core.settings import DEMO_MODEL
from tests.clients.conftest import Record, Running
from tests.support.engine_adapters import bias_without_end

MESSAGES: Any = [{"role": "user", "content": "When are you open on Friday, and what does a repair cost?"}]


@pytest.fixture
def client(attune: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=attune.base_url, api_key=attune.key, max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "shop", "messages": MESSAGES, "max_tokens": 40, **fields})


def text_of(reply: Any) -> str:
    return reply.choices[0].message.content or ""


def output_ids(record: Record, reply: Any) -> list[int]:
    [turn] = record.turns(reply.id)
    return turn.output_ids or []


def test_temperature_zero_is_greedy_and_higher_ones_sample(client: openai.OpenAI) -> None:
    assert len({text_of(ask(client, temperature=0)) for _ in range(3)}) == 1
    assert len({text_of(ask(client, temperature=1.5)) for _ in range(6)}) > 1


def test_small_top_p_leaves_the_most_probable_token(client: openai.OpenAI, record: Record) -> None:
    greedy = output_ids(record, ask(client, temperature=0))
    for _ in range(3):
        assert output_ids(record, ask(client, temperature=1.0, top_p=1e-6)) == greedy


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_penalties_make_repetition_rarer(client: openai.OpenAI, record: Record, name: str) -> None:
    complete = ask(client, temperature=0, max_tokens=160)
    assert complete.choices[0].finish_reason == "stop"
    end_of_turn = output_ids(record, complete)[-1]

    def num_distinct(penalty: float) -> int:
        """Return how many of 80 tokens differ. None of them ends the reply, so that all have one length."""
        fields: dict[str, Any] = {name: penalty, "logit_bias": {str(end_of_turn): -100}}
        ids = output_ids(record, ask(client, temperature=0, max_tokens=80, **fields))
        assert len(ids) == 80
        return len(set(ids))

    assert num_distinct(-2.0) < num_distinct(2.0)


def test_logit_bias_bans_and_forces_a_token(client: openai.OpenAI, record: Record) -> None:
    first = output_ids(record, ask(client, temperature=0))[0]
    assert output_ids(record, ask(client, temperature=0, max_tokens=1, logit_bias={str(first): -100})) != [first]
    assert output_ids(record, ask(client, max_tokens=3, logit_bias={str(first): 100})) == [first] * 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_length_limits_cut_the_reply(client: openai.OpenAI, record: Record, name: str) -> None:
    never_ends: Any = {"logit_bias": bias_without_end(DEMO_MODEL)}
    reply = ask(client, **{"max_tokens": None, name: 3}, **never_ends)
    assert reply.choices[0].finish_reason == "length" and len(output_ids(record, reply)) == 3
    both = ask(client, max_tokens=9, max_completion_tokens=2, **never_ends)
    assert len(output_ids(record, both)) == 2


def test_stop_texts_end_the_reply_before_them(client: openai.OpenAI) -> None:
    text = text_of(ask(client, temperature=0))
    for stop in (text[10:13], [text[20:30], text[10:13]], ["never said"]):
        stopped = text_of(ask(client, temperature=0, stop=stop))
        stops = [stop] if isinstance(stop, str) else stop
        assert stopped == text[: min([text.index(one) for one in stops if one in text], default=len(text))]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_seed_is_recorded_and_a_hint(client: openai.OpenAI, record: Record, seed: int) -> None:
    reply = ask(client, seed=seed, n=2, max_tokens=4)
    turns = record.turns(reply.id)
    assert len(turns) == 2 and turns[0].sampling["seed"] == seed and turns[0].exclusion_reason is None
    assert reply.system_fingerprint.endswith(";seed=hint")


def test_end_user_and_metadata_are_stored(client: openai.OpenAI, record: Record) -> None:
    reply = ask(client, user="anna", metadata={"ticket": "7"}, max_tokens=2)
    [turn] = record.turns(reply.id)
    assert (turn.end_user, turn.request_metadata) == ("anna", {"ticket": "7"})
    [turn] = record.turns(ask(client, user="anna", safety_identifier="bert", max_tokens=2).id)
    assert turn.end_user == "bert"


def test_tier_changes_no_reply(client: openai.OpenAI, record: Record) -> None:
    plain, flex = ask(client, temperature=0), ask(client, temperature=0, service_tier="flex")
    assert (plain.service_tier, flex.service_tier) == (None, "flex")
    assert output_ids(record, plain) == output_ids(record, flex)


def test_hints_change_nothing(client: openai.OpenAI, record: Record) -> None:
    hints: dict[str, Any] = {
        "verbosity": "low",
        "reasoning_effort": "high",
        "prompt_cache_key": "k",
        "store": False,
        "extra_body": {"prompt_cache_retention": "24h", "prompt_cache_options": {}},
    }
    plain, hinted = ask(client, temperature=0), ask(client, temperature=0, **hints)
    assert output_ids(record, plain) == output_ids(record, hinted)
    [first], [second] = record.turns(plain.id), record.turns(hinted.id)
    assert first.sampling == second.sampling and first.request_params == second.request_params
