"""Names beside the points of a figure, where they neither cover one another nor points, as far as there is room."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from distembed.reports.pages import PAGE_COLOUR

FONT_POINTS = 8.0
_CHARACTER_POINTS, _LINE_POINTS, _POINT_POINTS = 0.56 * FONT_POINTS, 1.25 * FONT_POINTS, 9.0


@dataclass(frozen=True)
class LabelledPoint:
    """A point of a figure, with what stands beside it.

    Attributes:
        x: Its place from the left.
        y: Its place from the bottom.
        text: Its label.
        colour: The label's colour.
    """

    x: float
    y: float
    text: str
    colour: str = PAGE_COLOUR


@dataclass(frozen=True)
class _Box:
    left: float
    bottom: float
    width: float
    height: float

    def overlap(self, other: "_Box") -> float:
        """Returns the area that two boxes have in common."""
        width = min(self.left + self.width, other.left + other.width) - max(self.left, other.left)
        height = min(self.bottom + self.height, other.bottom + other.height) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)


def place_labels(
    points: Sequence[LabelledPoint], others: Sequence[tuple[float, float]], width: float, height: float
) -> list[tuple[float, float]]:
    """Returns where the left end and the middle of each label's line stand, relative to its point.

    Labels are placed one after the other, each as near to its point as it covers nothing and stays within the figure;
    where there is no such place, where it covers least. All lengths are points of 1/72 inch.

    Args:
        points: The points with their labels.
        others: Places of points without labels, which are not covered either.
        width: Width of the axes.
        height: Height of the axes.
    """
    half = _POINT_POINTS / 2
    places = [*((point.x, point.y) for point in points), *others]
    taken = [_Box(x - half, y - half, _POINT_POINTS, _POINT_POINTS) for x, y in places]
    inside = _Box(0, 0, width, height)
    placed = []
    for point in points:
        own_width = text_width(point.text)
        boxes = [
            _Box(point.x + dx, point.y + dy - _LINE_POINTS / 2, own_width, _LINE_POINTS)
            for dx, dy in _offsets(own_width)
        ]
        covered = [
            sum(box.overlap(other) for other in taken) + 2 * (own_width * _LINE_POINTS - box.overlap(inside))
            for box in boxes
        ]
        best = boxes[covered.index(min(covered))]
        taken.append(best)
        placed.append((best.left - point.x, best.bottom + _LINE_POINTS / 2 - point.y))
    return placed


def text_width(text: str) -> float:
    """Returns about how wide a label is, in points."""
    return _CHARACTER_POINTS * len(text)


def draw_labels(axes: Axes, points: Sequence[LabelledPoint], others: Sequence[tuple[float, float]]) -> None:
    """Writes labels beside points of a figure whose limits are set, with a line to the point where one is not near.

    Args:
        axes: The axes.
        points: The points with their labels, at finite places in the axes' own numbers.
        others: Finite places of points without labels, which are not covered.
    """
    if not points:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    box = axes.get_position()
    size = [72 * inches for inches in figure.get_size_inches() * (box.width, box.height)]
    places = [*((point.x, point.y) for point in points), *others]
    # what the layout takes for the axes' texts later is little
    drawn = (axes.transLimits.transform(axes.transScale.transform(places)) * size).tolist()
    moved = [replace(point, x=x, y=y) for point, (x, y) in zip(points, drawn, strict=False)]
    for point, (dx, dy) in zip(points, place_labels(moved, drawn[len(points) :], *size), strict=True):
        gap = math.hypot(max(dx, -dx - text_width(point.text), 0.0), max(abs(dy) - _LINE_POINTS / 2, 0.0))
        axes.annotate(
            point.text,
            (point.x, point.y),
            xytext=(dx, dy),
            textcoords="offset points",
            fontsize=FONT_POINTS,
            color=point.colour,
            va="center",
            arrowprops={"arrowstyle": "-", "alpha": 0.5, "linewidth": 0.6, "color": point.colour}
            if gap > 1.5 * _LINE_POINTS
            else None,
        )


def _offsets(width: float) -> list[tuple[float, float]]:
    """Returns places of a label around its point, the nearest first: right, left, above, below, and further off."""
    offsets = []
    for ring in range(1, 9):
        far = _POINT_POINTS * (0.4 + 0.3 * ring) + 2
        sides = (far, -far - width, -width / 2)
        heights = (0.0, _LINE_POINTS * 0.6 * ring, -_LINE_POINTS * 0.6 * ring)
        offsets += [(x, y) for y, x in itertools.product(heights, sides) if y or x != -width / 2]
    return offsets
