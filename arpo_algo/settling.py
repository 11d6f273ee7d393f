"""Whether entropies that are only estimated settle a decision to branch.

A strategy decides by the estimates. Its decision on a point is settled when the point would get as many children wherever within their bounds the true
entropies lie. It is enough to look at two extremes, if what a point gets depends on every entropy in one direction: this point's entropy after the observation
as high as it can be and every rival's as low as it can be, and the reverse; the other windows likewise. That holds for thresholds, rankings, budgets, and
rules blind to entropy. The strategy itself is asked what it would do there, so one written by a user needs nothing for it.

Windows that several points share, such as the initial one of trajectories from the same root, have one entropy, whatever it is: it cancels out of a
ranking. A rule that serves thresholds in row order (AuthorsBranching) depends on it in both directions at once; there a decision may be called settled that an
initial entropy between its bounds would change. Equal windows are taken for shared: estimates and bounds that agree to the last bit come from the same
distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from arpo_algo.branching import Allocation, BranchPoint
from arpo_algo.entropy import Window


def settled(points: Sequence[BranchPoint], allocations: Sequence[Allocation], allocate: Callable[[Sequence[BranchPoint]], Sequence[Allocation]]) -> list[bool]:
    """For each of ``points`` whether it gets the children of its allocation wherever within the bounds the entropies lie.

    ``allocate``: what gave ``allocations`` for ``points``, with the same budget and random numbers at every call.
    """
    if all(window.bounds is None for point in points for window in point.windows):
        return [True] * len(points)
    return [
        all(allocate(_extreme(points, index, rises))[index].children == allocation.children for rises in (True, False))
        for index, allocation in enumerate(allocations)
    ]


def _extreme(points: Sequence[BranchPoint], index: int, rises: bool) -> list[BranchPoint]:
    """The points with the entropies at the end of their bounds where the change at point ``index`` is greatest (``rises``) or least beside the others'."""
    ends: dict[Window, tuple[float, ...]] = {}
    for point, up in [(points[index], rises), *((point, not rises) for position, point in enumerate(points) if position != index)]:
        for window, high in zip(point.windows, (not up, up, up), strict=True):
            ends.setdefault(window, window.greatest if high else window.least)
    moved = []
    for point in points:
        initial, after, before = (ends[window] for window in point.windows)
        moved.append(replace(point, initial=initial, after=after, before=before))
    return moved
