"""What the tests of weight transfer ask of vLLM's workers beside what the product does; imported in the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from arpo_algo.policies.vllm_shared_memory import WeightReceiver


class ProbedReceiver(WeightReceiver):
    def mapped(self) -> int:
        """How many pieces of a sender's memory this worker still maps."""
        return sum("arpo-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def mend(self) -> None:
        """Undoes an update that failed midway, so that several tests can share an engine; its weights are a mixture then."""
        worker: Any = self
        for layer in worker.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
                info.reset()
        worker._weight_update_active = False
