"""Count how often a wrong delivery is found in bfloat16: `python -m tests.benchmarks.delivery`.

The demo model is updated in bfloat16 on the CPU. After each update the version is verified twice: on an engine with its
adapter, which must be accepted, and on one that has its parent's adapter under its name, which must be refused.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from app.core.settings import DEMO_MODEL, Settings
from app.models import Version
from tests.support.bfloat16_updates import DTYPE, make_updates
from workers.release.verify_delivery import (
    NotDelivered,
    Timings,
    max_logprob_difference,
    position_from_parent,
    require_delivered,
)


def is_accepted(scores: list[list[float]], version: Version, settings: Settings) -> bool:
    try:
        require_delivered(scores, version, settings, Timings())
    except NotDelivered:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--kl-targets", type=float, nargs="+", default=[0.01, 0.001])
    options = parser.parse_args()
    settings = Settings.model_validate({"dtype": DTYPE})
    columns = "share of the way: version (least), parent (largest)"
    print(f"| KL target | updates | version accepted | parent found | {columns} | largest noise |")
    print("|---|---|---|---|---|---|")
    for kl_target in options.kl_targets:
        accepted = found = 0
        shares: list[float] = []
        parent_shares: list[float] = []
        noise: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            for update in make_updates(Path(DEMO_MODEL), Path(folder), options.updates, kl_target=kl_target):
                accepted += is_accepted(update.delivered, update.version, settings)
                found += not is_accepted(update.parent_delivered, update.version, settings)
                assert update.version.probe is not None
                own, parent = update.version.probe["logprobs"], update.version.probe["parent_logprobs"]
                for found_shares, scores in ((shares, update.delivered), (parent_shares, update.parent_delivered)):
                    position = position_from_parent(scores, own, parent)
                    assert position is not None
                    found_shares.append(position[0])
                noise.append(max_logprob_difference(update.delivered, own))
        print(
            f"| {kl_target:g} | {options.updates} | {accepted} | {found} | "
            f"{median(shares):.2f} ({min(shares):.2f}), {median(parent_shares):.2f} ({max(parent_shares):.2f}) | "
            f"{max(noise):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
