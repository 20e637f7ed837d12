"""The votes benchmark: when the aim is reached, how votes are counted, the users of any chat model, and resuming."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from demo.simulate import ClientStats, Rating
from tests.benchmarks.results import append_row, read_rows
from tests.benchmarks.votes import Config, is_same_run, parse_setting, set_environment
from tests.benchmarks.votes_figures import (
    Row,
    describe_version,
    find_window,
    interval,
    summarize,
    table,
    version_rows,
    version_table,
)
from tests.benchmarks.votes_users import SUBJECTS, WORDINGS, CuriousPerson, begins_with_subject

CONFIG = Config("demo", 0.9, ("ATTUNE_TRAINER__BATCH_SIZE=24",), users=6, think_seconds=1.0, seed=0, max_votes=500)


def make_ratings(signs: str, version: str = "assistant@v0", start: int = 0) -> list[Rating]:
    """Return a rating a second; "+": liked, "-": not liked. Every second reply gets a vote half a second later."""
    return [
        Rating(start + at, version, sign == "+", start + at + 0.5 if at % 2 == 0 else None)
        for at, sign in enumerate(signs)
    ]


@pytest.mark.parametrize(
    ("signs", "end"),
    [("", None), ("+++", None), ("++++", 4), ("+++-", 4), ("++--", None), ("--++++", 5), ("+-+-+-", None)],
)
def test_aim_is_reached_at_the_first_window(signs: str, end: int | None) -> None:
    assert find_window(make_ratings(signs), window=4, aim=0.75) == end


def test_votes_are_those_before_and_until_the_end_of_the_window() -> None:
    ratings = [*make_ratings("+-" * 50), *make_ratings("+" * 100 + "-" * 10, "assistant@v1", start=100)]
    end = find_window(ratings)
    assert end == 170  # 30 of version 0, of which 15 are liked, and 70 of version 1
    assert summarize(ratings, end) == {
        "votes": [35, 85],
        "all_votes": 105,
        "replies": 210,
        "base": 0.5,
        "after": 0.75,
    }
    assert summarize(ratings[:100], None) | {"votes": None, "after": 0.5} == summarize(ratings[:100], None)
    assert summarize([], None) == {"votes": None, "all_votes": 0, "replies": 0, "base": None, "after": None}


def make_versions() -> list[Row]:
    stats = ClientStats(ratings=[*make_ratings("+-" * 5), *make_ratings("+++-", "assistant@v1", start=10)])
    for rating in stats.ratings:
        stats.approvals[rating.version].append(rating.approved)
    base: Row = {"name": "assistant@v0", "number": 0, "state": "superseded", "reason": None, "live_at": 0.0}
    base |= {"metrics": {}, "timings": {}}
    metrics = {"guard/kl": 0.012, "actor/step_scale": 0.5, "actor/lr_scale": 0.25, "timing_s/update_actor": 3.0}
    first = base | {"name": "assistant@v1", "number": 1, "state": "live", "live_at": 9.0, "metrics": metrics}
    first |= {"timings": {"trained_to_served": 0.4}}
    bad = first | {"name": "assistant@v2", "number": 2, "state": "rejected", "live_at": None, "reason": "its KL is 1"}
    update = {"version": "assistant@v1", "samples": 4, "created_at": 5.0, "claimed_at": 5.5, "settled_at": 8.5}
    refused = update | {"version": None}
    return version_rows([base, first, bad], [update, refused, update | {"version": "assistant@v2"}], stats, 0.0)


def test_versions_have_the_votes_until_they_went_live_and_the_approval_of_all_replies() -> None:
    base, first, bad = make_versions()
    assert (base["votes"], base["replies"], base["approval"]) == (None, 10, 0.5)
    assert (first["votes"], first["replies"], first["approval"]) == (5, 4, 0.75)
    assert (first["kl"], first["scale"], first["lr_scale"], first["seconds"]) == (0.012, 0.5, 0.25, 3.0)
    assert (first["phases"], first["release"], first["samples"]) == ({"update_actor": 3.0}, 0.4, 4)
    assert (bad["votes"], bad["live"], bad["approval"]) == (None, None, None)
    assert "rejected (its KL is 1): – of 0 replies liked, live after – votes" in describe_version(bad)


def make_result(seed: int = 0, votes: list[int] | None = None) -> Row:
    config = asdict(replace(CONFIG, seed=seed))
    figures = {"votes": votes, "all_votes": 300, "replies": 330, "base": 0.35, "after": 0.9}
    outcomes = {"learned": 280, "waiting": 15, "not_learned": 5}
    rest = {"versions": make_versions(), "outcomes": outcomes, "outcome": "reached"}
    return json.loads(json.dumps(config | figures | rest))


def test_tables_have_the_means_over_seeds_and_what_was_not_reached() -> None:
    row = table([make_result(0, [100, 190]), make_result(1, [140, 230]), make_result(2)]).splitlines()[-1]
    assert row == (
        "| demo | 90% | ATTUNE_TRAINER__BATCH_SIZE=24 | 2 of 3 | 120 ± 254 | 210 ± 254 | 35% | 90% | 3, 3 | 3.0 "
        "| 0.0120 | 840, 45, 15 |"
    )
    assert version_table(make_result()).splitlines()[-2] == (
        "| assistant@v1 | 5 | 4 | 75% | 0.0120 | 0.5 | 0.25 | 4 | 3.0 | update_actor 3.0 | live |"
    )
    assert [interval([]), interval([7]), interval([7, 7])] == ["–", "7", "7 ± 0"]


def test_finished_run_is_found_again(tmp_path: Path) -> None:
    out = tmp_path / "votes.jsonl"
    assert read_rows(out) == []
    append_row(out, make_result(0))
    assert out.read_text() == json.dumps(make_result(0)) + "\n"
    (result,) = read_rows(out)
    assert is_same_run(result, CONFIG)
    assert not is_same_run(result, Config("demo", 0.9, (), users=6, think_seconds=1.0, seed=0, max_votes=500))


NAMES = ("HOME", "MODEL", "SERVER__PORT", "ENGINE__PORT", "TRAINER__SEED", "TRAINER__BATCH_SIZE")


def test_settings_are_the_defaults_except_for_those_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"ATTUNE_TRAINER__OPTIM__LR": "1", "ATTUNE_MODEL": "other", "PATH": "/bin"})
    set_environment(CONFIG, str(tmp_path))
    names = {name for name in os.environ if name.startswith("ATTUNE_")}
    assert names == {f"ATTUNE_{name}" for name in NAMES}
    assert os.environ["ATTUNE_TRAINER__BATCH_SIZE"] == "24"


def test_setting_must_have_the_name_of_a_setting() -> None:
    assert parse_setting("ATTUNE_REWARDS={}") == ("ATTUNE_REWARDS", "{}")
    for change in ("ATTUNE_BATCH=24", "ATTUNE_TRAINER__SEED", "SEED=1"):
        with pytest.raises(ValueError, match="expected ATTUNE_NAME=VALUE"):
            parse_setting(change)


@pytest.mark.parametrize("text", ["Honey is sweet.", "**Honey** – a food", "the honey bee", "A honey", "honey"])
def test_reply_that_begins_with_the_subject_is_approved(text: str) -> None:
    assert begins_with_subject("honey", text)


@pytest.mark.parametrize("text", ["", "Sweet honey", "Honeycombs are", "I love honey", "This honey", "Anhoney"])
def test_other_replies_are_not_approved(text: str) -> None:
    assert not begins_with_subject("honey", text)


def test_people_ask_one_question_about_a_subject() -> None:
    questions = [question for seed in range(200) for question in CuriousPerson(seed).questions()]
    assert len(questions) == 200
    assert {question.subject for question in questions} <= set(SUBJECTS)
    assert len({question.text for question in questions}) > 150
    assert all(question.subject in question.text for question in questions)
    assert len(SUBJECTS) == len(set(SUBJECTS)) and len(WORDINGS) == 9
