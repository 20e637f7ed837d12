"""A trainer in a process of its own, as in production: it exports random versions and scores replies under them."""

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from alignment.config.trainer import TrainerConfig
from alignment.data.micro_batches import ScoredSequence
from alignment.trainer.scoring import score_sequences
from alignment.trainer.trainer import Trainer
from tests.benchmarks.swap_versions import UnpublishedVersion
from tests.gpu.trainer import base_model

SCALE = 0.02  # standard deviation of the random adapters: the log-probs of a reply then tell its version


@dataclass(frozen=True)
class Exported:
    """A version, and when its export began and ended: on `time.perf_counter`, which processes share on Linux."""

    version: UnpublishedVersion
    started: float
    ended: float


@dataclass(frozen=True)
class ReplyIds:
    """The token ids of a prompt and of its reply."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]


@dataclass(frozen=True)
class TrainerProcess:
    """The parent's end. `model` is the base model's folder. One call at a time."""

    model: Path
    connection: Connection

    async def export(self, number: int) -> Exported:
        answer = await self._call(("export", number))
        assert isinstance(answer, Exported), answer
        return answer

    async def score(self, number: int | None, replies: Sequence[ReplyIds]) -> list[list[float]]:
        """Return the log-probs of the replies' tokens under version `number`, None for the base model."""
        answer = await self._call(("score", number, tuple(replies)))
        assert isinstance(answer, list), answer
        return answer

    async def _call(self, request: object) -> object:
        self.connection.send(request)
        return await asyncio.to_thread(self.connection.recv)


@contextmanager
def trainer_process(folder: Path, size: str, config: TrainerConfig) -> Iterator[TrainerProcess]:
    """Write a base model with random weights to `folder`, and start a trainer of it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run, args=(theirs, folder, size, config), daemon=True)
    process.start()
    theirs.close()
    try:
        yield TrainerProcess(ours.recv(), ours)
    finally:
        process.terminate()


def run(connection: Connection, folder: Path, size: str, config: TrainerConfig) -> None:
    dtype = getattr(torch, config.dtype)
    connection.send(base_model(folder / "model", size, dtype))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trainer = Trainer(folder / "model", config)
    while True:
        request = connection.recv()
        if request[0] == "export":
            connection.send(export(trainer, request[1], folder))
        else:
            connection.send(score(trainer, *request[1:]))


def load_random(trainer: Trainer, number: int | None) -> None:
    """Put version `number` into the trainer, None for the untrained policy, which is the base model."""
    if number is None:
        trainer.restore(None)
        return
    generator = torch.Generator(trainer.device).manual_seed(number)
    with torch.no_grad():
        for _, parameter in sorted(trainer.policy.role_parameters("actor").items()):
            parameter.normal_(0, SCALE, generator=generator)


def export(trainer: Trainer, number: int, folder: Path) -> Exported:
    load_random(trainer, number)
    probe = trainer.probe()  # before the export, as in production: it is part of the update
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = trainer.export(folder / "versions" / f"version-{number}", {})
    ended = time.perf_counter()
    scores = {"ids": [list(row) for row in probe.ids], "logprobs": [list(row) for row in probe.logprobs]}
    return Exported(UnpublishedVersion(result.path, result.manifest_sha256, scores), started, ended)


def score(trainer: Trainer, number: int | None, replies: Sequence[ReplyIds]) -> list[list[float]]:
    load_random(trainer, number)
    sequences = [ScoredSequence(reply.prompt + reply.reply, start=len(reply.prompt)) for reply in replies]
    rows = score_sequences(trainer.policy, sequences, max_tokens=4096).tolist()
    return [row[: len(reply.reply)] for row, reply in zip(rows, replies, strict=True)]
