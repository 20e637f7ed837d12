"""A child's part of the disk test: one attempt to train what is open, with a fault in its way."""

import os
import sys
import traceback
from typing import Any

from sqlalchemy import update

from app.core.database import Database
from app.core.settings import Settings
from app.models import Batch, BatchState
from tests.faults.suite import shim
from workers.context import WorkerContext
from workers.training import loop
from workers.training import ranks as training_ranks
from workers.training.trackers import Trackers

HIT, PASSED = 3, 0
TOLD = 9  # the shim knows this number too


def attempt(settings: Settings, fault: str, nth: int) -> int:
    """In a child: train what is open, with the fault in its way where `nth` is not 0; then, if that failed, as the
    ranks that torchrun starts anew would."""
    context = WorkerContext(settings)
    context.db = Database(settings.database)  # without a bell: nobody listens here
    trackers = Trackers(settings)
    settings.versions_dir.mkdir(exist_ok=True)
    ranks = training_ranks.RankGroup(settings)
    if nth:
        shim.arm(settings.versions_dir, nth, fault)
    try:
        loop.run_pending_work(ranks, context, trackers)
    except (OSError, training_ranks.RankGroupFailed):
        tell(shim.hit() or "nothing")
        shim.disarm()
        context.run(expire(context))
        loop.run_pending_work(training_ranks.RankGroup(settings), context, trackers)
        return HIT
    told = shim.hit()
    shim.disarm()
    if told is not None:  # a call that is allowed to fail
        tell(told)
        return HIT
    return PASSED


async def expire(context: WorkerContext) -> None:
    async with context.db.write() as session:
        await session.execute(update(Batch).where(Batch.state == BatchState.OPEN).values(lease_until=0.0))


def tell(words: str) -> None:
    os.write(TOLD, words.encode())


def fork(life: Any) -> tuple[int, str]:
    """How it ended, and what it told. A child that is killed has its last word said by the shim."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.dup2(writer, TOLD)
            os._exit(life())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(writer)
    told = b""
    while read := os.read(reader, 4096):
        told += read
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), told.decode()
