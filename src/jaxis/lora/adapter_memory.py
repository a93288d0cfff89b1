from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
from jax.typing import DTypeLike

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.extra_memory import ExtraMemory
from jaxis.engine.execution.feature import RequestFeature
from jaxis.host.byte_size import human_bytes
from jaxis.layers.module import JaxModule


class AdapterMemory(ExtraMemory):
    """Device memory for the places of adapters, whose number and rank engine arguments have."""

    def __init__(self, args: EngineArgs) -> None:
        from jaxis.lora.adaptable import ALL_LINEAR

        self._args = args
        self._targets = tuple(args.lora_target_modules or (ALL_LINEAR,))
        sizes = f"{args.max_loras} adapters of rank {args.max_lora_rank}"
        self.text = f"places for {sizes} (--max-loras, --max-lora-rank)"

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        from jaxis.lora.adaptable import place_bytes

        return self._args.max_loras * place_bytes(model, dtype, self._args.max_lora_rank, self._targets)

    def fill(self, executor: Executor, note: Callable[[str], None]) -> list[RequestFeature]:
        """Creates the places, and loads the adapters that are named at the start."""
        from jaxis.lora.feature import AdapterFeature
        from jaxis.lora.store import AdapterStore

        args = self._args
        [stage] = executor.stages  # `check_combinations` refuses others
        with jax.set_mesh(stage.context.mesh):
            root = None if args.lora_root is None else Path(args.lora_root)
            sizes = args.max_loras, args.max_lora_rank, args.max_cpu_loras
            store = AdapterStore(stage.context.model, *sizes, root, self._targets)
            store.load_named(args.lora_modules or {})
        size = human_bytes(args.max_loras * store.bytes_per_place)
        note(f"adapters: {size} for {args.max_loras} of rank {args.max_lora_rank} or less in a step")
        return [AdapterFeature(store)]


def make_memory(args: EngineArgs, *_: object) -> ExtraMemory:
    """Returns the memory for the places of adapters, if engine arguments ask for any."""
    return AdapterMemory(args) if args.enable_lora else ExtraMemory()
