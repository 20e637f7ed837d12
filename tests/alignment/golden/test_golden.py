"""The formulas give the recorded values and gradients of verl, TRL, OpenRLHF and AReaL on fixed batches."""

from typing import Any

import pytest
import torch

from tests.alignment.golden.records import batch_of, records
from tests.parity.case import VERSIONS, Case, gradients
from tests.parity.catalogue import CASES
from tests.parity.compare import distance, precision
from tests.parity.draws import cast

RECORDS = records()


def _name(record: dict[str, Any]) -> str:
    return f"{record['function']}, {record['title']}, {record['peer']}"


@pytest.mark.parametrize("record", RECORDS, ids=_name)
def test_result_equals_the_peers_recorded_result(record: dict[str, Any]) -> None:
    leaf = tuple(record["gradients"])
    case = Case(record["function"], record["title"], record["call"], (), record["settings"], leaf)
    batch = cast(batch_of(record["draw"]), torch.float64, leaf)
    with precision(torch.float64):
        value = case.ours(batch)
        actual = gradients(value, batch, leaf)
        expected = torch.tensor(record["value"])
    assert distance(value, expected) <= record["bound"]
    for name, gradient in zip(leaf, actual, strict=True):
        expected = torch.tensor(record["gradients"][name], dtype=torch.float64)
        assert expected.abs().max() > 0
        assert distance(gradient, expected) <= record["bound"]


def test_every_case_has_golden_records() -> None:
    """If this fails after a case was added or changed, run `.venv-parity/bin/python -m tests.parity.freeze`."""
    compared = {
        (case.call, case.title, f"{peer} {VERSIONS[peer]}", repr(_plain(case.settings)))
        for case in CASES
        for peer in case.peers
    }
    frozen = {(record["call"], record["title"], record["peer"], repr(_plain(record["settings"]))) for record in RECORDS}
    assert compared == frozen


def _plain(x: Any) -> Any:
    """Return the settings as JSON represents them: lists instead of tuples."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list | tuple) else x
