"""Write the peers' results on fixed batches to tests/alignment/golden. It needs the environment of `make parity`:

    .venv-parity/bin/python -m tests.parity.freeze

The default tests compare Attune with these records, without a peer installed.
"""

import json
from typing import Any

import torch
from torch import Tensor

from tests.alignment.golden.records import DRAWS, FOLDER, batch_of
from tests.parity.case import VERSIONS, Case, gradients
from tests.parity.catalogue import CASES_BY_TOPIC
from tests.parity.compare import precision
from tests.parity.draws import KINDS, cast, draw

SHAPE = (6, 8)
SEED = 20261121


def main() -> None:
    generator = torch.Generator().manual_seed(SEED)
    draws = {kind: {name: to_lists(x, 5) for name, x in draw(kind, SHAPE, generator).items()} for kind in KINDS}
    DRAWS.write_text(json.dumps(draws, separators=(",", ":")) + "\n")
    for topic, cases in CASES_BY_TOPIC.items():
        lines = [json.dumps(record(case, peer), ensure_ascii=False) for case in cases for peer in case.peers]
        (FOLDER / f"{topic}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(sum(path.stat().st_size for path in FOLDER.glob("*.json")), "bytes in", FOLDER)


def record(case: Case, peer: str) -> dict[str, Any]:
    kind = next(
        (kind for kind in ("empty", "holes") if kind in case.kinds), case.kinds[0]
    )  # the most difficult kind that the case supports
    batch = cast(batch_of(kind), torch.float64, case.leaf)
    with precision(torch.float64):
        value = case.theirs(peer, batch)
        grads = gradients(value, batch, case.leaf)
    return {
        "function": case.function,
        "title": case.title,
        "peer": f"{peer} {VERSIONS[peer]}",
        "call": case.call,
        "settings": dict(case.settings),
        "draw": kind,
        "bound": case.bound64,
        "value": to_lists(value, 13),
        "gradients": {name: to_lists(grad, 13) for name, grad in zip(case.leaf, grads, strict=True)},
    }


def to_lists(tensor: Tensor, digits: int) -> Any:
    """Return nested lists; floats have this many significant digits."""

    def round_floats(x: Any) -> Any:
        return (
            [round_floats(y) for y in x]
            if isinstance(x, list)
            else float(f"{x:.{digits}g}")
            if isinstance(x, float)
            else x
        )

    return round_floats(tensor.detach().tolist())


if __name__ == "__main__":
    main()
