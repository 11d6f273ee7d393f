"""Making several things that hold resources: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def all_or_none(n: int, make: Callable[[], T], close: Callable[[T], object]) -> list[T]:
    """``n`` things that ``make`` makes. Where one cannot be made, those made before it are closed and its error is raised."""
    made: list[T] = []
    try:
        for _ in range(n):
            made.append(make())
    except BaseException:
        for thing in made:
            close(thing)
        raise
    return made
