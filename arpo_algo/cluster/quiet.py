"""What runs first in every process that Ray starts for a run. Loads nothing."""

from __future__ import annotations

import logging


def set_up() -> None:
    """Silences a watchdog of Ray Train that complains every second where Ray runs without its dashboard, which it asks for the state of an actor."""
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)
