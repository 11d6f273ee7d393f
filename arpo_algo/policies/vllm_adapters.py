"""The LoRA adapters that a :class:`~arpo_algo.policies.vllm.VLLMPolicy` serves one after the other, each a version of the weights."""

from __future__ import annotations

import shutil
import weakref
from typing import Any

from arpo_algo.policies.vllm_lora import drop_adapter, load_adapter, request_of, save_adapter, scratch_folder
from arpo_algo.policies.vllm_turns import Engine, Turns


class Adapters:
    """Puts adapters into ``engine``, and takes those out that none of ``turns`` needs any more."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self._engine, self._turns = engine, turns
        self._folder = scratch_folder()
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, True)  # also where the script ends without close
        self._loaded: list[Any] = []

    def serve(self, model: Any, version: int) -> None:
        """Samples the turns that begin from now on with the adapter of a peft model. Raises ``ValueError`` where vLLM cannot serve all of it."""
        save_adapter(model, self._folder, version)
        request = request_of(version, self._folder)

        async def change(llm: Any) -> None:
            for old in [lora for lora in self._loaded if not self._turns.use(lora)]:
                self._loaded.remove(old)
                await drop_adapter(llm, old)
            await load_adapter(llm, request)
            self._loaded.append(request)
            self._turns.lora = request

        self._engine.run(change)

    def close(self) -> None:
        """Deletes the files of all adapters."""
        self._remove()
