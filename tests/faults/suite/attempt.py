"""The child process of the disk cases: one attempt to train the open batch, with a fault at one system call."""

import os
import sys
import traceback
from collections.abc import Callable

from sqlalchemy import update

from app.core.database import Database
from app.core.settings import Settings
from app.models import Batch, BatchState
from tests.faults.suite import shim
from workers.context import WorkerContext
from workers.training import ranks as training_ranks
from workers.training.loop import TrainingLoop
from workers.training.trackers import Trackers

FAILED, PASSED = 3, 0  # exit codes
REPORT_FD = 9  # shim.c has the same number


def attempt(settings: Settings, fault: str, nth: int) -> int:
    """Train the open batch, with the fault at the `nth` call if `nth` is not 0. Return the exit code.

    After a failure it is trained again, as the ranks that torchrun restarts would. The name of the call that failed is
    written to REPORT_FD.
    """
    context = WorkerContext(settings)
    context.db = Database(settings.database_url)  # without a TaskSender: no other process runs
    trackers = Trackers(settings)
    settings.versions_dir.mkdir(exist_ok=True)
    ranks = training_ranks.RankGroup(settings)
    if nth:
        shim.arm(settings.versions_dir, nth, fault)
    try:
        TrainingLoop(ranks, context, trackers).run_pending_work()
    except (OSError, training_ranks.RankGroupFailed):
        write_report(shim.failed_call() or "nothing")
        shim.disarm()
        context.run(expire_lease(context))
        TrainingLoop(training_ranks.RankGroup(settings), context, trackers).run_pending_work()
        return FAILED
    failed_call = shim.failed_call()
    shim.disarm()
    if failed_call is not None:  # the export does not need this call
        write_report(failed_call)
        return FAILED
    return PASSED


async def expire_lease(context: WorkerContext) -> None:
    async with context.db.write() as session:
        await session.execute(update(Batch).where(Batch.state == BatchState.OPEN).values(lease_until=0.0))


def write_report(call: str) -> None:
    os.write(REPORT_FD, call.encode())


def fork(main: Callable[[], int]) -> tuple[int, str]:
    """Run `main` in a child process. Return its exit code and its report, which the shim writes if it is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.dup2(writer, REPORT_FD)
            os._exit(main())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(writer)
    report = b""
    while content := os.read(reader, 4096):
        report += content
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), report.decode()
