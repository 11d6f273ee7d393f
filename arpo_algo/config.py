"""All settings of a training run in one frozen dataclass. A default lives here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

from arpo_algo.bounds import check_above, check_at_least
from arpo_algo.branching import AnyBranching, EntropyBranching, check_strategy
from arpo_algo.learner import LearnerConfig
from arpo_algo.rollout_config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class ARPOConfig(LearnerConfig):
    """A run of :class:`arpo_algo.ARPOTrainer`: the learner's settings, the loop's, and how groups are sampled and branched.

    ``temperature`` is taken from ``rollout``; ``total_steps`` follows from ``steps``, ``epochs`` and ``minibatches`` unless given.
    """

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How a group is sampled."""
    branching: AnyBranching = field(default_factory=EntropyBranching)
    """Where to branch: one of ``arpo_algo.branching``, or an object of your own with its one method."""
    seed: int = 0
    """Decides which tasks come when, every sampled token, the order of rows in mini-batches, and how adapters start."""
    lora_rank: int = 0
    """Train LoRA adapters of this rank on all linear layers instead of the model's own weights; 0: full fine-tuning. Needs ``arpo[lora]``."""
    lora_alpha: int = 32
    """Scale of the adapters: their product counts lora_alpha / lora_rank times."""
    steps: int = 100
    """Steps of sampling and updating."""
    tasks_per_step: int = 8
    """Groups in one step."""
    scale_by_std: bool = True
    """Divide advantages by the standard deviation of the group (GRPO); False: Dr. GRPO."""
    resample_rounds: int = 0
    """Dynamic sampling (DAPO): how many times groups whose rewards are all equal are replaced by groups of further tasks before the step goes on without."""
    drop_truncated: bool = False
    """Leave trajectories out of the statistics and the loss that ran into a token limit (overlong filtering, DAPO)."""
    overlong_buffer: int = 0
    """Soft overlong punishment (DAPO, eq. 13): the reward falls by up to 1 over the last so many sampled tokens before ``overlong_limit``. 0: off."""
    overlong_limit: int = 0
    """Sampled tokens of a trajectory at which the punishment is whole."""
    max_staleness: int = 0
    """Sample ahead while the learner works: a token may be sampled by weights this many updates older than those it trains. 0: on-policy."""
    update_in_flight: bool = False
    """With ``max_staleness``: give the policy new weights in the middle of its turns, each token recording its version, instead of when a batch is complete."""
    max_mismatch: float = 0.2
    """Stop the run when sampler and learner disagree about the log-probabilities of sampled tokens by more than this in the mean, in nats."""
    eval_every: int = 0
    """Evaluate after every so many steps; 0: only when asked."""
    eval_tasks: int = 200
    """Tasks of an evaluation, the first ones of ``eval_tasks`` given to the trainer."""
    save_every: int = 50
    """Write a checkpoint after every so many steps; the last step is always written."""
    keep_checkpoints: int = 2
    record_every: int = 1
    """Write the trees of every so many steps to disk; 0: none."""
    max_failed_share: float = 0.25
    """Stop the run when more of a step's trajectories than this ended in an environment that raised or hung."""
    max_unavailable_share: float = 0.5
    """Stop the run when more of a step's tool calls than this found the tool's infrastructure unavailable."""

    def __post_init__(self) -> None:
        if self.temperature not in (1.0, self.rollout.temperature):
            raise ValueError(f"temperature is taken from rollout.temperature={self.rollout.temperature}, got temperature={self.temperature} as well")
        object.__setattr__(self, "temperature", self.rollout.temperature)
        if self.schedule != "constant" and self.total_steps is None:
            object.__setattr__(self, "total_steps", self.steps * self.epochs * self.minibatches)
        super().__post_init__()
        if self.rollout.top_p < 1:
            raise ValueError(
                f"rollout.top_p must be 1 in training, got {self.rollout.top_p}: the learner's probabilities are over the full vocabulary,"
                " so the ratio would not start at 1"
            )
        check_strategy(self.branching)
        self._check_counts()

    def _check_counts(self) -> None:
        check_at_least(self, 1, "steps", "tasks_per_step", "save_every", "keep_checkpoints")
        check_at_least(self, 0, "lora_rank", "resample_rounds", "max_staleness", "overlong_buffer", "eval_every", "record_every")
        check_above(self, 0, "max_mismatch")
        if self.update_in_flight and not self.max_staleness:
            raise ValueError("update_in_flight=True needs max_staleness of at least 1, got 0: without it nothing is under way during an update")
        if self.overlong_buffer > self.overlong_limit:
            raise ValueError(f"overlong_buffer must be at most overlong_limit={self.overlong_limit}, got {self.overlong_buffer}")
