"""Trackers: real files, real TensorBoard, real W&B offline. A failing tracker does not fail an update."""

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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from typer.testing import CliRunner
from wandb.proto.wandb_internal_pb2 import Record

from app.cli.main import app
from app.core.settings import REPOSITORY, Settings, TrackerName, get_settings
from app.ops import experiment_log
from app.ops.experiment_log import Entry
from workers.training.trackers import BackgroundTracker, SafeTracker, Trackers

KL, SCORE = "actor/ppo_kl", "critic/score/mean"


def settings(home: Path, *trackers: TrackerName) -> Settings:
    return Settings(home=home, observability={"trackers": list(trackers)})


def update(trackers: Trackers, number: int, policy: str = "shop-3f2a1b", **metrics: float) -> None:
    values = {KL: number / 8, SCORE: -0.5, **metrics}
    trackers.log(policy.rpartition("-")[0], f"{policy}-v{number}", number, f"batch-{number}", values)


def read_entries(home: Path, policy: str = "shop") -> list[Entry]:
    return experiment_log.read(home / "metrics" / f"{policy}.jsonl").entries


def test_each_update_is_one_line_of_the_experiment_log(tmp_path: Path) -> None:
    trackers = Trackers(settings(tmp_path, "jsonl"))
    update(trackers, 1)
    update(trackers, 2)
    update(trackers, 1, "bakery-9f0e1d")
    trackers.close()
    assert [(entry.version, entry.number, entry.batch, entry.metrics[KL]) for entry in read_entries(tmp_path)] == [
        ("shop-3f2a1b-v1", 1, "batch-1", 0.125),
        ("shop-3f2a1b-v2", 2, "batch-2", 0.25),
    ]
    assert [entry.policy for entry in read_entries(tmp_path, "bakery")] == ["bakery"]


def test_metrics_that_are_not_finite_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics: Any = {"a/nan": math.nan, "a/inf": -math.inf, "a/text": "x", "a/none": None, "a/int": 3}
    update(Trackers(settings(tmp_path, "jsonl")), 1, **metrics)
    [entry] = read_entries(tmp_path)
    assert entry.metrics == {KL: 0.125, SCORE: -0.5, "a/int": 3.0}
    assert list(entry.left_out) == ["a/inf", "a/nan", "a/none", "a/text"]
    assert "shop-3f2a1b-v1: no finite number, so not tracked: a/inf, a/nan, a/none, a/text" in caplog.text


def test_tensorboard_reads_every_metric_at_its_version(tmp_path: Path) -> None:
    for numbers in ((1, 2), (5,)):  # a trainer, and the next one after a restart
        trackers = Trackers(settings(tmp_path, "tensorboard"))
        for number in numbers:
            update(trackers, number)
        update(trackers, 7, "shop-9f0e1d")
        trackers.close()
    runs = {folder.name: EventAccumulator(str(folder)) for folder in (tmp_path / "metrics" / "tensorboard").iterdir()}
    assert set(runs) == {"shop-3f2a1b", "shop-9f0e1d"}, "two projects' policies of one name are two runs"
    for run in runs.values():
        run.Reload()
    run = runs["shop-3f2a1b"]
    assert set(run.Tags()["scalars"]) == {KL, SCORE}
    assert [(event.step, event.value) for event in run.Scalars(KL)] == [(1, 0.125), (2, 0.25), (5, 0.625)]
    assert not has_entries(tmp_path)


def has_entries(home: Path) -> bool:
    return any((home / "metrics").glob("*.jsonl"))


TRACKING_SCRIPT = """
import os, sys
from pathlib import Path
from app.core.settings import Settings
from workers.training import trackers as module
module.CLOSE_SECONDS = 300.0  # W&B starts and ends services of its own
trackers = module.Trackers(Settings(home=Path(sys.argv[1]), observability={"trackers": ["jsonl", "wandb"]}))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    for line in ("shop-3f2a1b", "shop-9f0e1d"):
        trackers.log("shop", f"{line}-v{number}", number, "batch", {"actor/ppo_kl": number / 8, "reference_kl": 0.5})
if sys.argv[4:]:
    print("tracked", flush=True)
    sys.stdin.read()
trackers.close()
os._exit(0)  # as the trainer leaves
"""


def start_tracking(home: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Track in a subprocess, because W&B starts service processes that end with it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-c", TRACKING_SCRIPT, str(home), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**clean, "HOME": str(home), "NETRC": str(home / "netrc"), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_records(file: Path) -> Iterator[Record]:
    """Read a W&B run file: seven bytes, then blocks of 32 KiB with chunks of (checksum, size, kind, content)."""
    data, at, content = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        remaining = 32768 - at % 32768
        if remaining < 7:
            at += remaining
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            return  # the record is being written
        content += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            record = Record()
            record.ParseFromString(content)
            content = b""
            yield record


def read_history(file: Path) -> list[dict[str, str]]:
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in read_records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def test_wandb_logs_every_update_offline(tmp_path: Path) -> None:
    for first, last in ((1, 4), (4, 6)):  # a trainer, and the next one after a restart
        process = start_tracking(tmp_path, first, last, WANDB_MODE="offline")
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and "takes no metrics" not in errors, output + errors
    files = sorted((tmp_path / "metrics" / "wandb").glob("offline-run-*/run-shop-3f2a1b.wandb"))
    rows = [row for file in files for row in read_history(file)]
    assert [(row["_step"], row["actor/ppo_kl"], row["reference_kl"]) for row in rows] == [
        (str(number), repr(number / 8), "0.5") for number in range(1, 6)
    ]
    [run] = [record.run for record in read_records(files[0]) if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.project) == ("shop-3f2a1b", "attune")
    assert len({file.stem for file in (tmp_path / "metrics" / "wandb").glob("offline-run-*/*.wandb")}) == 2


def test_wandb_environment_variables_are_respected(tmp_path: Path) -> None:
    start_tracking(tmp_path, 1, 2, WANDB_MODE="offline", WANDB_PROJECT="bicycles", WANDB_ENTITY="shop").communicate()
    [file] = (tmp_path / "metrics" / "wandb").glob("offline-run-*/run-shop-3f2a1b.wandb")
    [run] = [record.run for record in read_records(file) if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.entity) == ("bicycles", "shop")


def test_killed_trainer_leaves_its_log_and_no_wandb_process(tmp_path: Path) -> None:
    running = start_tracking(tmp_path, 1, 4, "stay", WANDB_MODE="offline")
    assert running.stdout is not None and running.stdout.readline() == "tracked\n"
    process = psutil.Process(running.pid)
    while not (service_processes := process.children(recursive=True)):
        assert running.poll() is None
    running.kill()
    running.communicate()
    assert [entry.number for entry in read_entries(tmp_path)] == [1, 1, 2, 2, 3, 3]
    _, alive = psutil.wait_procs(service_processes, timeout=120)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_wandb_writes_an_update_before_the_next_one(tmp_path: Path) -> None:
    running = start_tracking(tmp_path, 1, 4, "stay", WANDB_MODE="offline", WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL="0.1")
    assert running.stdout is not None and running.stdout.readline() == "tracked\n"
    rows: list[dict[str, str]] = []
    deadline = time.monotonic() + 120
    while len(rows) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
        rows = [
            row for file in (tmp_path / "metrics").glob("wandb/*/run-shop-3f2a1b.wandb") for row in read_history(file)
        ]
    running.communicate(input="", timeout=120)
    assert [row["_step"] for row in rows] == ["1", "2", "3"]


def test_wandb_without_a_key_is_logged_once_and_jsonl_continues(tmp_path: Path) -> None:
    process = start_tracking(tmp_path, 1, 5, WANDB_MODE="online")
    output, errors = process.communicate(input="", timeout=120)
    assert process.returncode == 0, output + errors
    assert errors.count("wandb accepts no metrics; training continues") == 1 and "API key" in errors
    assert len(read_entries(tmp_path)) == 8


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """Put the experiment log on a full disk."""
    (tmp_path / "metrics").mkdir()
    path = tmp_path / "metrics" / "shop.jsonl"
    path.symlink_to("/dev/full")
    return path


def test_full_disk_is_logged_once_and_affects_no_other_tracker(
    tmp_path: Path, full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers(settings(tmp_path, "jsonl", "tensorboard"))
    for number in (1, 2, 3):
        update(trackers, number)
    assert [record.message for record in caplog.records if "jsonl" in record.message] == [
        "jsonl accepts no metrics; training continues: OSError: [Errno 28] No space left on device"
    ]
    full_disk.unlink()  # the disk has space again
    update(trackers, 4)
    trackers.close()
    assert [entry.number for entry in read_entries(tmp_path)] == [4]
    run = EventAccumulator(str(tmp_path / "metrics" / "tensorboard" / "shop-3f2a1b")).Reload()
    assert [event.step for event in run.Scalars(KL)] == [1, 2, 3, 4]


class StuckTracker:
    """A tracker that blocks until `answer` is set."""

    def __init__(self) -> None:
        self.called, self.answer = threading.Event(), threading.Event()
        self.numbers, self.closed = list[int](), False

    def log(self, entry: Entry) -> None:
        self.called.set()
        self.answer.wait()
        self.numbers.append(entry.number)

    def close(self) -> None:
        self.closed = True


def make_entry(number: int) -> Entry:
    return Entry("shop", f"shop-3f2a1b-v{number}", number, "batch", 1.0, {})


def test_slow_tracker_delays_nothing_and_gets_all_entries_in_order() -> None:
    blocked = StuckTracker()
    background = BackgroundTracker(SafeTracker("stuck", blocked))
    for number in range(5):
        background.log(make_entry(number))
    assert blocked.numbers == []
    blocked.answer.set()
    background.close()
    assert (blocked.numbers, blocked.closed) == ([0, 1, 2, 3, 4], True)


def test_queue_of_a_blocked_tracker_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workers.training.trackers.MAX_QUEUED", 3)
    monkeypatch.setattr("workers.training.trackers.CLOSE_SECONDS", 0.01)
    blocked = StuckTracker()
    background = BackgroundTracker(SafeTracker("stuck", blocked))
    background.log(make_entry(0))
    assert blocked.called.wait(60), "the first entry is taken from the queue"
    for number in range(1, 5):
        background.log(make_entry(number))
    background.close()
    assert "stuck is 3 updates late and misses shop-3f2a1b-v4" in caplog.text
    blocked.answer.set()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_missing_tracker_package_is_named_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: TrackerName
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    message = rf"observability.trackers names {tracker}.*pip install {tracker}"
    with pytest.raises(ValueError, match=message):
        Trackers(settings(tmp_path, "jsonl", tracker))
    monkeypatch.setenv("ATTUNE_OBSERVABILITY__TRACKERS", f'["{tracker}"]')
    get_settings.cache_clear()
    for command in ("trainer", "up"):
        result = CliRunner().invoke(app, [command])
        assert isinstance(result.exception, ValueError) and f"pip install {tracker}" in str(result.exception)
    get_settings.cache_clear()


def test_without_trackers_nothing_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers(settings(tmp_path))
    with caplog.at_level(logging.WARNING):
        update(trackers, 1)
    trackers.close()
    assert list(tmp_path.iterdir()) == [] and caplog.records == []
