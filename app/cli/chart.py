"""Charts of a metric over versions: braille characters in a terminal, or a PNG.

Not plotext: version 6 draws through a compiled library for each platform, frames every plot and rounds points to its
own grid. The forty lines below place each version's dot exactly and need nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS, ROWS = 2, 4  # dots in one braille cell
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row, as Unicode numbers them
BLANK = 0x2800

Point = tuple[int, float]


@dataclass(frozen=True)
class Series:
    """One metric of one policy. `points` are (version number, value), ascending, at least one."""

    name: str
    points: Sequence[Point]

    @property
    def first(self) -> Point:
        return self.points[0]

    @property
    def last(self) -> Point:
        return self.points[-1]

    @property
    def min(self) -> Point:
        return min(self.points, key=lambda point: point[1])

    @property
    def max(self) -> Point:
        return max(self.points, key=lambda point: point[1])


def draw_lines(series: Series, width: int, height: int = 8) -> list[str]:
    """Return lines of at most `width` characters: a title, `height` lines of chart, and the axis of versions."""
    low, high = series.min[1], series.max[1]
    labels = {0: format_value(high), height - 1: format_value(low)} if high > low else {height // 2: format_value(high)}
    margin = max(map(len, labels.values()))
    canvas = BrailleCanvas(max(1, width - margin - 2), height)
    dots = [canvas.locate(point, series, low, high) for point in series.points]
    for start, end in zip(dots, dots[1:] or dots, strict=False):
        canvas.draw_line(start, end)
    rows = canvas.rows()
    chart = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{cells}".rstrip()
        for row, cells in enumerate(rows)
    ]
    first, last = f"v{series.first[0]}", f"v{series.last[0]}" if len(series.points) > 1 else ""
    gap = max(1, canvas.width - len(first) - len(last))
    indent = " " * (margin + 1)
    return [
        summarize(series),
        *chart,
        f"{indent}└{'─' * canvas.width}",
        f"{indent} {first}{' ' * gap}{last}".rstrip(),
    ]


def summarize(series: Series) -> str:
    """Example: "reference_kl: last 0.02 (v9), min 0.001 (v1), max 0.03 (v4)" """
    points = (("last", series.last), ("min", series.min), ("max", series.max))
    return f"{series.name}: " + ", ".join(
        f"{name} {format_value(value)} (v{number})" for name, (number, value) in points
    )


def format_value(value: float) -> str:
    """Format with four significant digits. Example: 0.0123456 -> "0.01235" """
    return f"{value:.4g}"


class BrailleCanvas:
    """A grid of cells of 2 × 4 dots. Dot (0, 0) is at the upper left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._cells = [[BLANK] * width for _ in range(height)]

    def locate(self, point: Point, series: Series, low: float, high: float) -> tuple[int, int]:
        """Return a point's dot. A constant series is drawn in the middle, a single version at the left."""
        first, last = series.first[0], series.last[0]
        x = (point[0] - first) / (last - first) if last > first else 0.0
        y = (point[1] - low) / (high - low) if high > low else 0.5
        return round(x * (self.width * COLUMNS - 1)), round((1 - y) * (self.height * ROWS - 1))

    def draw_line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for step in range(steps + 1):
            share = step / steps
            self._set(round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1])))

    def _set(self, x: int, y: int) -> None:
        self._cells[y // ROWS][x // COLUMNS] |= DOTS[x % COLUMNS][y % ROWS]

    def rows(self) -> list[str]:
        return ["".join(map(chr, row)).rstrip(chr(BLANK)) for row in self._cells]


def write_png(all_series: Sequence[Series], heading: str, path: Path) -> None:
    """Write the charts to a PNG, one below the other.

    Raises ValueError if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # an optional dependency that loads slowly
    except ImportError as error:
        raise ValueError("a PNG needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(9, 2.6 * len(all_series)), layout="constrained")
    figure.suptitle(heading)
    for axes, series in zip(figure.subplots(len(all_series), squeeze=False)[:, 0], all_series, strict=True):
        axes.plot(*zip(*series.points, strict=True), marker=".")
        axes.set_title(series.name, fontsize="medium")
        axes.set_xlabel("version")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
