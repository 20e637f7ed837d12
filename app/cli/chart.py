"""Charts: a metric over versions, as braille in a terminal or as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLUMNS, ROWS = 2, 4  # dots of one braille cell
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row, as Unicode numbers them
BLANK = 0x2800


@dataclass(frozen=True)
class Series:
    """One metric of one policy; `points` are version number and value, by rising number, one at least."""

    name: str
    points: Sequence[tuple[int, float]]

    @property
    def first(self) -> tuple[int, float]:
        return self.points[0]

    @property
    def last(self) -> tuple[int, float]:
        return self.points[-1]

    @property
    def lowest(self) -> tuple[int, float]:
        return min(self.points, key=lambda point: point[1])

    @property
    def highest(self) -> tuple[int, float]:
        return max(self.points, key=lambda point: point[1])


def draw(series: Series, width: int, height: int = 8) -> list[str]:
    """Lines of at most `width` characters: a title, `height` lines of chart, and the axis of versions."""
    low, high = series.lowest[1], series.highest[1]
    labels = {0: short(high), height - 1: short(low)} if high > low else {height // 2: short(high)}
    margin = max(map(len, labels.values()))
    canvas = Canvas(max(1, width - margin - 2), height)
    dots = [canvas.place(point, series, low, high) for point in series.points]
    for start, end in zip(dots, dots[1:] or dots, strict=False):
        canvas.line(start, end)
    rows = canvas.rows()
    chart = [
        f"{labels.get(at, ''):>{margin}} {'┤' if at in labels else '│'}{row}".rstrip() for at, row in enumerate(rows)
    ]
    begins, ends = f"v{series.first[0]}", f"v{series.last[0]}" if len(series.points) > 1 else ""
    gap = max(1, canvas.width - len(begins) - len(ends))
    pad = " " * (margin + 1)
    return [title(series), *chart, f"{pad}└{'─' * canvas.width}", f"{pad} {begins}{' ' * gap}{ends}".rstrip()]


def title(series: Series) -> str:
    """Example: "reference_kl: last 0.02 (v9), min 0.001 (v1), max 0.03 (v4)" """
    named = (("last", series.last), ("min", series.lowest), ("max", series.highest))
    return f"{series.name}: " + ", ".join(f"{word} {short(value)} (v{number})" for word, (number, value) in named)


def short(value: float) -> str:
    """Four figures. Example: 0.0123456 -> "0.01235" """
    return f"{value:.4g}"


class Canvas:
    """Cells of 2 × 4 dots; dot (0, 0) is at the upper left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._cells = [[BLANK] * width for _ in range(height)]

    def place(self, point: tuple[int, float], series: Series, low: float, high: float) -> tuple[int, int]:
        """Which dot a point is. A span of nothing is drawn in the middle, a lone version at the left."""
        (begins, _), (ends, _) = series.first, series.last
        across = (point[0] - begins) / (ends - begins) if ends > begins else 0.0
        up = (point[1] - low) / (high - low) if high > low else 0.5
        return round(across * (self.width * COLUMNS - 1)), round((1 - up) * (self.height * ROWS - 1))

    def line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for step in range(steps + 1):
            share = step / steps
            self._set(round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1])))

    def _set(self, x: int, y: int) -> None:
        self._cells[y // ROWS][x // COLUMNS] |= DOTS[x % COLUMNS][y % ROWS]

    def rows(self) -> list[str]:
        return ["".join(map(chr, row)).rstrip(chr(BLANK)) for row in self._cells]


def picture(several: Sequence[Series], heading: str, path: Path) -> None:
    """A PNG, one chart under the other. Raises ValueError where matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.figure import Figure  # an extra, and slow to load
    except ImportError as error:
        raise ValueError("a picture needs matplotlib, which is not installed here: pip install matplotlib") from error
    figure = Figure(figsize=(9, 2.6 * len(several)), layout="constrained")
    figure.suptitle(heading)
    for axes, series in zip(figure.subplots(len(several), squeeze=False)[:, 0], several, strict=True):
        axes.plot(*zip(*series.points, strict=True), marker=".")
        axes.set_title(series.name, fontsize="medium")
        axes.set_xlabel("version")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
