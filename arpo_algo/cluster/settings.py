"""How many engines, environment workers and learner ranks a run on a Ray cluster has, and on what. Loads nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from arpo_algo.bounds import check_above, check_at_least


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """What a run takes of a Ray cluster."""

    engines: int = 1
    """Actors that hold an engine each; a rollout tree stays with one of them."""
    engine_gpus: float = 0.0
    """GPUs of an engine. vLLM with ``tensor_parallel_size=n`` needs n."""
    engine_cpus: float = 1.0
    """CPUs of an engine."""
    engine_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of an engine, under the names that the cluster's machines were started with."""
    rollout_actors: int = 1
    """Actors that hold an environment, its forks and sandboxes, and sample groups in it."""
    env_cpus: float = 1.0
    """CPUs of a rollout actor."""
    env_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of a rollout actor."""
    learners: int = 1
    """Ranks of the learner (Ray Train)."""
    learner_gpus: float = 0.0
    """GPUs of a learner rank: 0 or 1."""
    learner_cpus: float = 1.0
    """CPUs of a learner rank."""
    address: str | None = None
    """Cluster to join: ``auto`` for the one that this machine is part of, or ``host:port``. None: the one that RAY_ADDRESS names, else one started here."""
    local_cpus: int | None = None
    """CPUs that a cluster started here says it has; None: as many as there are."""
    object_store_mib: int | None = None
    """Memory of the object store of a cluster started here, in MiB. Holds the weights twice; what does not fit is spilled to disk. None: Ray's own choice."""
    chunk_mib: int = 256
    """Weights go into the object store in pieces of about this size, in MiB, but at least a tensor."""
    max_replacements: int = 3
    """How many engines, how many rollout actors, and how many times the learner are replaced in a run before the next loss ends it."""
    start_timeout: float = 900.0
    """Seconds within which an actor or a learner rank must have started: room for it found, model loaded, environment made."""
    storage: Path | None = None
    """Folder for Ray Train's own records, which all machines with learner ranks must see; None: a temporary one, for ranks on one machine."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "engines", "rollout_actors", "learners", "chunk_mib", "local_cpus", "object_store_mib")
        check_at_least(self, 0, "engine_gpus", "engine_cpus", "env_cpus", "learner_cpus", "max_replacements")
        check_above(self, 0, "start_timeout")
        if self.learner_gpus not in (0, 1):
            raise ValueError(f"learner_gpus must be 0 or 1, got {self.learner_gpus}: a rank computes on one device; raise learners instead")
        self._check_address()

    def _check_address(self) -> None:
        if self.address is not None and (self.local_cpus is not None or self.object_store_mib is not None):
            said = {f.name: getattr(self, f.name) for f in fields(self) if f.name in ("address", "local_cpus", "object_store_mib")}
            raise ValueError(f"local_cpus and object_store_mib are for a cluster started here, not for one that is joined, got {said}")

    @property
    def engine_request(self) -> dict[str, float]:
        """Resources of one engine, by Ray's names."""
        return {"CPU": self.engine_cpus, "GPU": self.engine_gpus, **self.engine_resources}

    @property
    def env_request(self) -> dict[str, float]:
        """Resources of one rollout actor, by Ray's names."""
        return {"CPU": self.env_cpus, **self.env_resources}

    @property
    def learner_request(self) -> dict[str, float]:
        """Resources of one learner rank, by Ray's names."""
        return {"CPU": self.learner_cpus, "GPU": self.learner_gpus}
