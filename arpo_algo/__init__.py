"""ARPO: sample trajectories, branch them where the policy's entropy rises after a tool result, train with GRPO.

::

    trainer = ARPOTrainer("path/to/model", gymnasium.make("arpo/World-v0"), ARPOConfig(steps=50, lr=1e-5))
    trainer.train()

Names are imported when they are first used, so that the parts that need no torch (trees, branching, advantages) load without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arpo_algo.branching import (
        Allocation,
        AuthorsBranching,
        BranchingStrategy,
        BranchPoint,
        EntropyBranching,
        LowEntropyBranching,
        NoBranching,
        RandomBranching,
        TopEntropyBranching,
        UniformBranching,
        UnsettledBranching,
    )
    from arpo_algo.codec import ChatCodec, Codec, PlainCodec
    from arpo_algo.config import ARPOConfig
    from arpo_algo.entropy import EntropyBounds, estimate_entropies, truncated_entropy
    from arpo_algo.evaluate import EvalResult
    from arpo_algo.learner import Learner, LearnerConfig
    from arpo_algo.policies.base import Generation, Policy, SamplingParams, ServedPolicy
    from arpo_algo.policies.pool import PolicyPool
    from arpo_algo.policies.scripted import ScriptedPolicy
    from arpo_algo.policies.server import ServerError, ServerPolicy
    from arpo_algo.policies.transformers import TransformersPolicy
    from arpo_algo.policies.vllm import VLLMPolicy
    from arpo_algo.rollout import sample_groups
    from arpo_algo.rollout_config import RolloutConfig
    from arpo_algo.sampler import LocalSampler, Sampler
    from arpo_algo.sft import SFTConfig, SFTExample
    from arpo_algo.train import ARPOTrainer, TrainResult
    from arpo_algo.tree import RolloutTree, Trajectory
    from arpo_algo.tree_text import print_tree

_HOME = {
    "branching": (
        "Allocation", "AuthorsBranching", "BranchPoint", "BranchingStrategy", "EntropyBranching", "LowEntropyBranching", "NoBranching",
        "RandomBranching", "TopEntropyBranching", "UniformBranching", "UnsettledBranching",
    ),
    "codec": ("ChatCodec", "Codec", "PlainCodec"),
    "config": ("ARPOConfig",),
    "entropy": ("EntropyBounds", "estimate_entropies", "truncated_entropy"),
    "evaluate": ("EvalResult",),
    "learner": ("Learner", "LearnerConfig"),
    "policies.base": ("Generation", "Policy", "SamplingParams", "ServedPolicy"),
    "policies.pool": ("PolicyPool",),
    "policies.scripted": ("ScriptedPolicy",),
    "policies.server": ("ServerError", "ServerPolicy"),
    "policies.transformers": ("TransformersPolicy",),
    "policies.vllm": ("VLLMPolicy",),
    "rollout": ("sample_groups",),
    "rollout_config": ("RolloutConfig",),
    "sampler": ("LocalSampler", "Sampler"),
    "sft": ("SFTConfig", "SFTExample"),
    "train": ("ARPOTrainer", "TrainResult"),
    "tree": ("RolloutTree", "Trajectory"),
    "tree_text": ("print_tree",),
}  # fmt: skip

__all__ = [
    "ARPOConfig",
    "ARPOTrainer",
    "Allocation",
    "AuthorsBranching",
    "BranchPoint",
    "BranchingStrategy",
    "ChatCodec",
    "Codec",
    "EntropyBounds",
    "EntropyBranching",
    "EvalResult",
    "Generation",
    "Learner",
    "LearnerConfig",
    "LocalSampler",
    "LowEntropyBranching",
    "NoBranching",
    "PlainCodec",
    "Policy",
    "PolicyPool",
    "RandomBranching",
    "RolloutConfig",
    "RolloutTree",
    "SFTConfig",
    "SFTExample",
    "Sampler",
    "SamplingParams",
    "ScriptedPolicy",
    "ServedPolicy",
    "ServerError",
    "ServerPolicy",
    "TopEntropyBranching",
    "TrainResult",
    "Trajectory",
    "TransformersPolicy",
    "UniformBranching",
    "UnsettledBranching",
    "VLLMPolicy",
    "estimate_entropies",
    "print_tree",
    "sample_groups",
    "truncated_entropy",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"arpo_algo.{module}"), name)
    raise AttributeError(f"module 'arpo_algo' has no attribute {name!r}")
