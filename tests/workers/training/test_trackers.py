"""Trackers: real files, real TensorBoard, real W&B without a network; and no trouble of theirs is an update's."""

import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner
from wandb.proto.wandb_internal_pb2 import Record

from app.cli.main import app
from app.core.settings import REPOSITORY, Settings, TrackerName, get_settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry
from workers.training.trackers import Trackers
from workers.training.trackers.base import Behind, Guarded

KL, SCORE = "actor/ppo_kl", "critic/score/mean"


def settings(home: Path, *trackers: TrackerName) -> Settings:
    return Settings(home=home, trackers=list(trackers))


def update(trackers: Trackers, number: int, policy: str = "shop-3f2a1b", **metrics: float) -> None:
    figures = {KL: number / 8, SCORE: -0.5, **metrics}
    trackers.log(policy.rpartition("-")[0], f"{policy}-v{number}", number, f"batch-{number}", figures)


def kept(home: Path, policy: str = "shop") -> list[Entry]:
    return experiment_log.read(home / "metrics" / f"{policy}.jsonl").entries


def test_each_update_is_a_line_of_the_journal(tmp_path: Path) -> None:
    trackers = Trackers(settings(tmp_path, "jsonl"))
    update(trackers, 1)
    update(trackers, 2)
    update(trackers, 1, "bakery-9f0e1d")
    trackers.close()
    assert [(one.version, one.number, one.batch, one.metrics[KL]) for one in kept(tmp_path)] == [
        ("shop-3f2a1b-v1", 1, "batch-1", 0.125),
        ("shop-3f2a1b-v2", 2, "batch-2", 0.25),
    ]
    assert [one.policy for one in kept(tmp_path, "bakery")] == ["bakery"]


def test_what_is_no_finite_number_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd: Any = {"a/nan": math.nan, "a/inf": -math.inf, "a/word": "x", "a/none": None, "a/int": 3}
    update(Trackers(settings(tmp_path, "jsonl")), 1, **odd)
    [one] = kept(tmp_path)
    assert one.metrics == {KL: 0.125, SCORE: -0.5, "a/int": 3.0}
    assert list(one.left_out) == ["a/inf", "a/nan", "a/none", "a/word"]
    assert "shop-3f2a1b-v1: no finite number, so not tracked: a/inf, a/nan, a/none, a/word" in caplog.text


def test_tensorboard_reads_every_metric_at_its_version(tmp_path: Path) -> None:
    for numbers in ((1, 2), (5,)):  # a trainer, and the one that came after it
        trackers = Trackers(settings(tmp_path, "tensorboard"))
        for number in numbers:
            update(trackers, number)
        update(trackers, 7, "shop-9f0e1d")
        trackers.close()
    runs = {folder.name: EventAccumulator(str(folder)) for folder in (tmp_path / "metrics" / "tensorboard").iterdir()}
    assert set(runs) == {"shop-3f2a1b", "shop-9f0e1d"}, "two projects' policies of one name are two runs"
    for run in runs.values():
        run.Reload()
    mine = runs["shop-3f2a1b"]
    assert set(mine.Tags()["scalars"]) == {KL, SCORE}
    assert [(event.step, event.value) for event in mine.Scalars(KL)] == [(1, 0.125), (2, 0.25), (5, 0.625)]
    assert not kept_anything(tmp_path)


def kept_anything(home: Path) -> bool:
    return any((home / "metrics").glob("*.jsonl"))


TRACKS = """
import os, sys
from pathlib import Path
from app.core.settings import Settings
from workers.training.trackers import Trackers
trackers = Trackers(Settings(home=Path(sys.argv[1]), trackers=["jsonl", "wandb"]))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    for line in ("shop-3f2a1b", "shop-9f0e1d"):
        trackers.log("shop", f"{line}-v{number}", number, "batch", {"actor/ppo_kl": number / 8, "reference_kl": 0.5})
if sys.argv[4:]:
    print("tracked", flush=True)
    sys.stdin.read()
trackers.close()
os._exit(0)  # as the trainer leaves
"""


def tracking(home: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """In a process of its own: W&B starts servants, and ends them with it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-c", TRACKS, str(home), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**clean, "HOME": str(home), "NETRC": str(home / "netrc"), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(file: Path) -> Iterator[Record]:
    """W&B's own file: after seven bytes, blocks of 32 KiB; in each, pieces of (checksum, size, kind, content)."""
    data, at, piece = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            return  # it is being written
        piece += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(piece)
            piece = b""
            yield record


def history(file: Path) -> list[dict[str, str]]:
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def test_wandb_keeps_every_update_without_a_network(tmp_path: Path) -> None:
    for first, last in ((1, 4), (4, 6)):  # a trainer, and the one that came after it
        done = tracking(tmp_path, first, last, WANDB_MODE="offline")
        told, trouble = done.communicate(timeout=120)
        assert done.returncode == 0 and "takes no metrics" not in trouble, told + trouble
    files = sorted((tmp_path / "metrics" / "wandb").glob("offline-run-*/run-shop-3f2a1b.wandb"))
    rows = [row for file in files for row in history(file)]
    assert [(row["_step"], row["actor/ppo_kl"], row["reference_kl"]) for row in rows] == [
        (str(number), repr(number / 8), "0.5") for number in range(1, 6)
    ]
    [run] = [record.run for record in records(files[0]) if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project) == ("shop-3f2a1b", "attune")
    assert len({file.stem for file in (tmp_path / "metrics" / "wandb").glob("offline-run-*/*.wandb")}) == 2


def test_wandbs_own_variables_hold(tmp_path: Path) -> None:
    tracking(tmp_path, 1, 2, WANDB_MODE="offline", WANDB_PROJECT="bicycles", WANDB_ENTITY="shop").communicate()
    [file] = (tmp_path / "metrics" / "wandb").glob("offline-run-*/run-shop-3f2a1b.wandb")
    [run] = [record.run for record in records(file) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.entity) == ("bicycles", "shop")


def test_a_killed_trainer_leaves_its_journal_and_no_servant_of_wandb(tmp_path: Path) -> None:
    running = tracking(tmp_path, 1, 4, "stay", WANDB_MODE="offline")
    assert running.stdout is not None and running.stdout.readline() == "tracked\n"
    alone = psutil.Process(running.pid)
    while not (servants := alone.children(recursive=True)):
        assert running.poll() is None
    running.kill()
    running.communicate()
    assert [one.number for one in kept(tmp_path)] == [1, 1, 2, 2, 3, 3]
    _, alive = psutil.wait_procs(servants, timeout=120)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_wandb_need_not_wait_for_the_next_update_to_keep_this_one(tmp_path: Path) -> None:
    running = tracking(tmp_path, 1, 4, "stay", WANDB_MODE="offline", WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL="0.1")
    assert running.stdout is not None and running.stdout.readline() == "tracked\n"
    rows: list[dict[str, str]] = []
    until = time.monotonic() + 120
    while len(rows) < 3 and time.monotonic() < until:
        time.sleep(0.05)
        rows = [row for file in (tmp_path / "metrics").glob("wandb/*/run-shop-3f2a1b.wandb") for row in history(file)]
    running.communicate(input="", timeout=120)
    assert [row["_step"] for row in rows] == ["1", "2", "3"]


def test_wandb_without_a_key_is_heard_of_once_and_the_journal_goes_on(tmp_path: Path) -> None:
    done = tracking(tmp_path, 1, 5, WANDB_MODE="online")
    told, trouble = done.communicate(input="", timeout=120)
    assert done.returncode == 0, told + trouble
    assert trouble.count("wandb takes no metrics, learning goes on") == 1 and "API key" in trouble
    assert len(kept(tmp_path)) == 8


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """The journal lies on a disk without room."""
    (tmp_path / "metrics").mkdir()
    path = tmp_path / "metrics" / "shop.jsonl"
    path.symlink_to("/dev/full")
    return path


def test_a_full_disk_is_heard_of_once_and_hurts_no_other_tracker(
    tmp_path: Path, full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers(settings(tmp_path, "jsonl", "tensorboard"))
    for number in (1, 2, 3):
        update(trackers, number)
    assert [record.message for record in caplog.records if "jsonl" in record.message] == [
        "jsonl takes no metrics, learning goes on: OSError: [Errno 28] No space left on device"
    ]
    full.unlink()  # there is room again
    update(trackers, 4)
    trackers.close()
    assert [one.number for one in kept(tmp_path)] == [4]
    run = EventAccumulator(str(tmp_path / "metrics" / "tensorboard" / "shop-3f2a1b")).Reload()
    assert [event.step for event in run.Scalars(KL)] == [1, 2, 3, 4]


class Stuck:
    """A tracker whose servers do not answer until `answer` is set."""

    def __init__(self) -> None:
        self.answer, self.heard, self.closed = threading.Event(), list[int](), False

    def log(self, entry: Entry) -> None:
        self.answer.wait()
        self.heard.append(entry.number)

    def close(self) -> None:
        self.closed = True


def entry(number: int) -> Entry:
    return Entry("shop", f"shop-3f2a1b-v{number}", number, "batch", 1.0, {})


def test_a_slow_tracker_holds_nobody_up_and_hears_everything_in_order() -> None:
    stuck = Stuck()
    behind = Behind(Guarded("stuck", stuck))
    for number in range(5):
        behind.log(entry(number))
    assert stuck.heard == []
    stuck.answer.set()
    behind.close()
    assert (stuck.heard, stuck.closed) == ([0, 1, 2, 3, 4], True)


def test_a_tracker_that_never_answers_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workers.training.trackers.base.MOST_WAITING", 3)
    monkeypatch.setattr("workers.training.trackers.base.CLOSE_SECONDS", 0.01)
    stuck = Stuck()
    behind = Behind(Guarded("stuck", stuck))
    for number in range(5):  # one may be on its way already
        behind.log(entry(number))
    behind.close()
    assert "stuck is 3 updates late and misses shop-3f2a1b-v4" in caplog.text
    stuck.answer.set()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: TrackerName
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(ValueError, match=rf"ATTUNE_TRACKERS names {tracker}.*pip install 'attune\[track\]'"):
        Trackers(settings(tmp_path, "jsonl", tracker))
    monkeypatch.setenv("ATTUNE_TRACKERS", f'["{tracker}"]')
    get_settings.cache_clear()
    for command in ("trainer", "up"):
        told = CliRunner().invoke(app, [command])
        assert isinstance(told.exception, ValueError) and "attune[track]" in str(told.exception)
    get_settings.cache_clear()


def test_without_trackers_nothing_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers(settings(tmp_path))
    with caplog.at_level(logging.WARNING):
        update(trackers, 1)
    trackers.close()
    assert list(tmp_path.iterdir()) == [] and caplog.records == []
