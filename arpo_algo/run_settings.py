"""The settings that the numbers of a run depend on: written beside them, and compared when the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from arpo_algo.config import ARPOConfig

MAY_DIFFER = (
    "steps", "total_steps", "save_every", "keep_checkpoints", "record_every", "max_mismatch", "max_failed_share", "max_unavailable_share",
    "micro_batch_tokens", "layout", "logit_chunk_mib", "gradient_checkpointing", "accumulate_whole",
)  # fmt: skip
"""Settings with which a resumed run may differ from the one that wrote the checkpoint."""


def run_settings(config: ARPOConfig, **objective: Callable[..., Any]) -> dict[str, Any]:
    """All that a result depends on besides model and environment, as JSON: settings, the strategy with its type, the functions of the objective by name."""
    strategy = config.branching
    values = asdict(strategy) if is_dataclass(strategy) and not isinstance(strategy, type) else {k: repr(v) for k, v in vars(strategy).items()}
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    described = settings | {
        "rollout": asdict(config.rollout),
        "branching": {"type": type(strategy).__qualname__, **values},
        "objective": {name: getattr(function, "__qualname__", repr(function)) for name, function in objective.items()},
    }
    return dict(json.loads(json.dumps(described, default=repr)))
