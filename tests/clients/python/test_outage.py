"""Votes through an outage of the API: each counts once. `tests.benchmarks.client_outage` has the full size."""

from pathlib import Path

import pytest

from tests.benchmarks.client_outage import run


@pytest.mark.slow  # the API starts twice; test_queue.py has the outages without a process
async def test_each_vote_counts_once(tmp_path: Path) -> None:
    result = await run(num_votes=600, outage_seconds=3.0, folder=tmp_path)
    assert result.waiting_at_restart > 300, "the votes of the outage waited in the file"
    assert (len(result.recorded), result.num_lost, result.num_extra) == (600, 0, 0)
