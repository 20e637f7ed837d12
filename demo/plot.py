"""Plot the learning curve to a PNG: approval, length and KL to the base model, by version."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

PANELS = (
    ("approval", "approved replies", (0.0, 1.0)),
    ("mean_length", "tokens a reply", (0.0, None)),
    ("reference_kl", "KL to the base model", (0.0, None)),
)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(8, 8), sharex=True, layout="constrained")
    for axis, (name, title, limits) in zip(axes, PANELS, strict=True):
        points = [(row["number"], row[name] if name in row else row["metrics"].get(name)) for row in rows]
        points = [point for point in points if point[1] is not None]
        axis.plot(*zip(*points, strict=True), marker="o", color="tab:green" if name == "approval" else "tab:blue")
        axis.set_ylabel(title)
        axis.set_ylim(*limits)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].axhspan(0.85, 1.0, color="tab:green", alpha=0.08)
    axes[1].axhspan(30, 80, color="tab:blue", alpha=0.08)
    axes[-1].set_xlabel("version")
    figure.suptitle("Approval, length and KL by version")
    figure.savefig(path, dpi=120)
    plt.close(figure)
