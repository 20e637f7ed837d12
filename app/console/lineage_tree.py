"""The tree of versions as a drawing: which version was trained from which, with abandoned branches below the line."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.policies.views import VersionView

COLUMN, LANE, MARGIN = 46, 40, 24  # px


@dataclass(frozen=True)
class Node:
    number: int
    state: str
    x: int
    y: int
    edge: str  # an SVG path from the parent; empty where the parent is not drawn
    description: str


@dataclass(frozen=True)
class Tree:
    nodes: list[Node]
    width: int
    height: int


def lay_out(versions: Sequence[VersionView], serving: int) -> Tree:
    """Place the versions, by number from left to right.

    The line that leads to the serving version, and on from there, is the first lane. Each branch that leaves it has a
    lane of its own, which is free again after its last version.

    Args:
        versions: In the order of their numbers; parents may be missing.
    """
    by_number = {version.number: version for version in versions}
    main = _line_to(serving, by_number)
    lanes: dict[int, int] = {}
    ends: list[int] = [-1]  # the last column that each lane uses
    last_child = {version.parent: version.number for version in versions if version.parent is not None}
    columns = {version.number: column for column, version in enumerate(versions)}
    for version in versions:
        parent = version.parent
        if version.number in main or (
            parent in main and parent == serving and version.state not in ("rejected", "rolled_back")
        ):
            lane = 0
        elif parent in lanes and lanes[parent] > 0 and last_child[parent] == version.number:
            lane = lanes[parent]
        else:
            start = columns.get(parent, columns[version.number]) if parent is not None else columns[version.number]
            lane = next((lane for lane in range(1, len(ends)) if ends[lane] < start), len(ends))
            if lane == len(ends):
                ends.append(-1)
        lanes[version.number] = lane
        ends[lane] = columns[version.number]
    nodes = []
    for version in versions:
        x, y = _place(columns[version.number], lanes[version.number])
        edge = ""
        if version.parent in columns:
            px, py = _place(columns[version.parent], lanes[version.parent])
            edge = (
                f"M{px} {py} H{x}" if py == y else f"M{px} {py} C{px + COLUMN // 2} {py} {px + COLUMN // 4} {y} {x} {y}"
            )
        parent_name = "no parent" if version.parent is None else f"trained from v{version.parent}"
        description = f"v{version.number}, {version.state.replace('_', ' ')}, {parent_name}"
        nodes.append(Node(version.number, version.state, x, y, edge, description))
    return Tree(nodes, 2 * MARGIN + COLUMN * max(len(versions) - 1, 0), 2 * MARGIN + LANE * (len(ends) - 1))


def _place(column: int, lane: int) -> tuple[int, int]:
    return MARGIN + COLUMN * column, MARGIN + LANE * lane


def _line_to(number: int, by_number: dict[int, VersionView]) -> set[int]:
    """Return the version and its ancestors, as far as they are known."""
    line: set[int] = set()
    at: int | None = number
    while at is not None and at not in line:
        line.add(at)
        at = by_number[at].parent if at in by_number else None
    return line
