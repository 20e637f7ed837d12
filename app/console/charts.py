"""Lines by version, as the page draws them and as a table says them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.console.rendering import DASH, format_figure, format_percent


class Row(NamedTuple):
    x: int
    value: str
    interval: str


@dataclass(frozen=True)
class Chart:
    """One line by version. Where a value is missing the line goes on to the next one.

    `low` and `high` are the ends of the 95 % intervals. `limits` are those of the axis; None follows the data.
    """

    title: str
    label: str
    unit: Literal["share", "number"]
    x: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    limits: tuple[float | None, float | None] = (0.0, None)
    note: str = ""

    def data(self) -> dict[str, object]:
        """Return what `charts.js` reads."""
        names = ("label", "unit", "x", "values", "low", "high", "limits")
        return {name: getattr(self, name) for name in names}

    def rows(self) -> list[Row]:
        """Return the same numbers for the table, without the versions that have none."""
        show = format_percent if self.unit == "share" else format_figure
        lows, highs = self.low or [None] * len(self.x), self.high or [None] * len(self.x)
        return [
            Row(x, show(value), DASH if low is None else f"{show(low)} to {show(high)}")
            for x, value, low, high in zip(self.x, self.values, lows, highs, strict=True)
            if value is not None
        ]
