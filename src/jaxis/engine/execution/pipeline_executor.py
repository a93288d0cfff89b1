"""Runs a model that is divided into pipeline stages: each has its own devices, and a step goes from one to the next.

A host has the stages whose devices, or some of whose devices, are its own. All hosts dispatch the same steps in the
same order, each its own stages' programs; what passes between hosts are hidden states (see `Handover`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxis.engine.execution.block_programs import LoadKey, SaveKey
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.handover import HandOn, Handover
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
      stage: Which it is.
    """

    model: JaxModule
    mesh: jax.sharding.Mesh
    plan: CachePlan
    stage: Stage


class PipelineExecutor(Executor):
    """An `Executor` of the last stage that this host has, which has the calls of those before made before its own.

    Nothing waits for anything here: a stage begins with the next step when it has handed on its hidden states. What it
    keeps from one step to the next is in its caches alone. With several stages, a step takes no tokens that another one
    samples, which the last stage has: whoever schedules steps waits for those.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        stages: Sequence[StageParts],
        meshes: Sequence[jax.sharding.Mesh],
        *,
        on_compile: Callable[[Hashable], AbstractContextManager[None]],
    ) -> None:
        """Allocates the caches of this host's stages.

        Args:
          vllm_config: The engine's configuration.
          stages: Those of this host, in their order.
          meshes: Of all stages.
          on_compile: See `Executor`.

        Raises:
          EngineError: No memory for the caches.
        """
        *earlier, own = stages
        self._earlier = [
            Executor(vllm_config, one.model, one.mesh, one.plan, on_compile=on_compile, stage=one.stage)
            for one in earlier
        ]
        last = own.stage.index
        # To each of this host's stages, and on from the last of them.
        self._to_stages = [
            None if one.stage.is_first else Handover(meshes[one.stage.index - 1], one.mesh) for one in stages
        ]
        self._onwards = None if own.stage.is_last else Handover(own.mesh, meshes[last + 1])
        super().__init__(vllm_config, own.model, own.mesh, own.plan, on_compile=on_compile, stage=own.stage)

    @property
    def stages(self) -> Sequence[Executor]:
        """See `Executor.stages`."""
        return [*self._earlier, self]

    @property
    def whole_plan(self) -> CachePlan:
        """See `Executor.whole_plan`."""
        plans = [stage.plan for stage in self.stages]
        structs = [struct for plan in plans for struct in plan.structs]
        groups = [group for plan in plans for group in plan.layer_groups]
        repeated = [heads for plan in plans for heads in plan.repeated_heads]
        return dataclasses.replace(self.plan, structs=structs, layer_groups=groups, repeated_heads=repeated)

    @property
    def newest(self) -> Any:
        """See `Executor.newest`."""
        return super().newest if self.stage.is_last else self.hidden

    def forward(self, key: ForwardKey, packed: np.ndarray) -> None:
        """See `Executor.forward`."""
        programs = self.programs.get(key)
        self._forget_hidden()
        self.hidden, self.rows = programs(packed)

    def whole(self, key: WholeKey, input_ids: np.ndarray, num_tokens: int) -> None:
        """See `Executor.whole`."""
        programs = self.programs.get(key)
        self._forget_hidden()
        self.hidden = programs(input_ids, np.int32(num_tokens))

    def block_structs(self, key: LoadKey) -> list[Any]:
        """See `Executor.block_structs`."""
        return [struct for part in self._block_parts(key.group) for struct in Executor.block_structs(part, key)]

    def save_blocks(self, key: SaveKey, block_ids: np.ndarray) -> list[Any]:
        """See `Executor.save_blocks`; block after block of the stages."""
        return [block for part in self._block_parts(key.group) for block in Executor.save_blocks(part, key, block_ids)]

    def load_blocks(self, key: LoadKey, block_ids: np.ndarray, blocks: list[Any]) -> None:
        """See `Executor.load_blocks`."""
        start = 0
        for part in self._block_parts(key.group):
            stop = start + len(part.block_programs.layers(key.group))
            Executor.load_blocks(part, key, block_ids, blocks[start:stop])
            start = stop

    def _block_parts(self, group: int) -> list[Executor]:
        """This host's stages that have caches of a group."""
        return [stage for stage in self.stages if stage.block_programs.layers(group)]

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
        """The program of a key; of one that the whole model runs, those of this host's stages, one after the other."""
        if isinstance(key, ForwardKey | WholeKey):
            num_tokens = key.shape.num_tokens if isinstance(key, ForwardKey) else key.num_tokens
            hidden = self.step_programs.hidden_struct(num_tokens)
            stages = [
                _StageProgram(stage, stage.step_programs.compile(key), link and link.compile(hidden))
                for stage, link in zip(self.stages, self._to_stages, strict=True)
            ]
            onwards = self._onwards and self._onwards.compile(hidden)
            return functools.partial(self._forward if isinstance(key, ForwardKey) else self._whole, stages, onwards)
        is_here = self.stage.is_last or isinstance(key, SaveKey | LoadKey)
        return super()._compile(key) if is_here else _never

    def _forward(
        self, programs: Sequence[_StageProgram], onwards: HandOn | None, packed: np.ndarray
    ) -> tuple[jax.Array, jax.Array | None]:
        """Dispatches each stage's model over a step.

        Returns:
          The hidden states and those to sample from; where another host has the last stage, what is ready once this
          host's stages are, and None.
        """
        given, rows = None, None
        for stage, program, link in programs:
            given = stage.last_tokens if link is None else link(given)
            operands = (stage.arrays.arrays, stage.caches, given, stage.ranks.place(packed))
            stage.caches, given, rows, _ = program(*operands)
        assert given is not None
        return given if onwards is None else onwards(given), rows

    def _whole(
        self,
        programs: Sequence[_StageProgram],
        onwards: HandOn | None,
        input_ids: np.ndarray,
        num_tokens: np.int32,
    ) -> jax.Array:
        """Dispatches each stage's model over a whole sequence; returns its hidden states, as `_forward` does."""
        given: Any = None
        for stage, program, link in programs:
            given = input_ids if link is None else link(given)
            given = program(stage.arrays.arrays, given, num_tokens)
        return given if onwards is None else onwards(given)


class _StageProgram(NamedTuple):
    """A program of one stage, and what brings it the hidden states of the stage before."""

    stage: Executor
    program: Program
    link: HandOn | None


def _never(*_: object) -> None:
    """In the place of a program of the last stage where another host has that."""
    raise RuntimeError("another host has the last stage")
