"""Runs a model that is divided into pipeline stages: each has its own devices, and a step goes from one to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.programs import Program
from jaxis.engine.execution.step_programs import ForwardKey, WholeKey
from jaxis.parallel.stages import Stage

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


class StageParts(NamedTuple):
    """What a stage is made of.

    Attributes:
      model: Its part of the model, loaded.
      mesh: Its devices.
      plan: Of its caches.
    """

    model: JaxModule
    mesh: jax.sharding.Mesh
    plan: CachePlan


class PipelineExecutor(Executor):
    """An `Executor` of the last stage, which has the calls of the others made before its own.

    Nothing waits for anything here: a stage begins with the next step when it has handed on its hidden states. What it
    keeps from one step to the next is in its caches alone. A step takes no tokens that another one samples, which the
    last stage has: whoever schedules steps waits for those.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        stages: Sequence[StageParts],
        *,
        on_compile: Callable[[Hashable], AbstractContextManager[None]],
    ) -> None:
        """Allocates the caches of all stages.

        Args:
          vllm_config: The engine's configuration.
          stages: In their order, at least two.
          on_compile: See `Executor`.

        Raises:
          EngineError: No memory for the caches.
        """
        *earlier, last = stages
        self._earlier = [
            Executor(vllm_config, *parts, on_compile=on_compile, stage=Stage(index, len(stages)))
            for index, parts in enumerate(earlier)
        ]
        # What the first stage takes for tokens that are in flight: no step of several stages needs any.
        self._no_tokens = np.zeros(vllm_config.scheduler_config.max_num_seqs, np.int32)
        super().__init__(vllm_config, *last, on_compile=on_compile, stage=Stage(len(earlier), len(stages)))

    @property
    def stages(self) -> Sequence[Executor]:
        """See `Executor.stages`."""
        return [*self._earlier, self]

    def forward(self, key: ForwardKey, packed: np.ndarray) -> None:
        """See `Executor.forward`."""
        programs = self.programs.get(key)
        self.hidden = self.rows = None
        self.hidden, self.rows = programs(packed)

    def whole(self, key: WholeKey, input_ids: np.ndarray, num_tokens: int) -> None:
        """See `Executor.whole`."""
        programs = self.programs.get(key)
        self.hidden = self.rows = None
        self.hidden = programs(input_ids, np.int32(num_tokens))

    def recover(self) -> None:
        """See `Executor.recover`."""
        for stage in self._earlier:
            stage.recover()
        super().recover()

    def close(self) -> None:
        """See `Executor.close`."""
        super().close()
        for stage in self._earlier:
            stage.close()

    def _compile(self, key: Hashable) -> Program:
        """The program of a key; of one that the whole model runs, those of all stages, one after the other."""
        program = super()._compile(key)
        if not isinstance(key, ForwardKey | WholeKey):
            return program
        programs = [*(stage.step_programs.compile(key) for stage in self._earlier), program]
        return functools.partial(self._forward if isinstance(key, ForwardKey) else self._whole, programs)

    def _forward(self, programs: Sequence[Program], packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Dispatches each stage's model over a step; returns its hidden states, and those to sample from."""
        given: Any = self._no_tokens
        rows = None
        for stage, program in zip(self.stages, programs, strict=True):
            if isinstance(given, jax.Array):
                given = _placed(given, stage.mesh)
            stage.caches, given, rows, _ = program(stage.arrays.arrays, stage.caches, given, packed)
        assert rows is not None
        return given, rows

    def _whole(self, programs: Sequence[Program], input_ids: np.ndarray, num_tokens: np.int32) -> jax.Array:
        """Dispatches each stage's model over a whole sequence; returns its hidden states."""
        given: Any = input_ids
        for stage, program in zip(self.stages, programs, strict=True):
            if isinstance(given, jax.Array):
                given = _placed(given, stage.mesh)
            given = program(stage.arrays.arrays, given, num_tokens)
        return given


def _placed(hidden: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """Hidden states that a stage hands on to the next, whole on each device of its mesh."""
    return jax.device_put(hidden, NamedSharding(mesh, PartitionSpec()))
