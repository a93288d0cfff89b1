"""Execution of a model that is divided into pipeline stages, each on its own devices.

A host has the stages whose devices, or some of whose devices, are its own. All hosts dispatch the same steps in the
same order, each its own stages' programs. Only hidden states pass between hosts (see `Handover`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.handover import HandOn, Handover
from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.program_key import Compiled, ProgramKey, RunsOn


class PipelineExecutor:
    """The `Executor` of this host's pipeline stages; `meshes` are those of all stages, those of other hosts included.

    Stages do not wait for each other here: a stage begins with the next step when it has handed on its hidden states. A
    stage keeps nothing from one step to the next but its caches. With several stages, a step takes no sampled tokens
    from another step in flight, since only the last stage has them: the scheduler waits for those tokens.

    Attributes:
      stages: The executors of this host's stages, in their order; at least one.
    """

    def __init__(self, stages: Sequence[DeviceExecutor], meshes: Sequence[jax.sharding.Mesh]) -> None:
        self.stages = stages
        # The links to each of this host's stages, and on from the last stage here.
        self._to_stages = [_handover(meshes, executor.stage.index) for executor in stages]
        self._onwards = _handover(meshes, stages[-1].stage.index + 1)

    @property
    def plan(self) -> CachePlan:
        plans = [executor.plan for executor in self.stages]
        return dataclasses.replace(
            plans[-1],
            structs=list(itertools.chain.from_iterable(plan.structs for plan in plans)),
            layer_groups=list(itertools.chain.from_iterable(plan.layer_groups for plan in plans)),
            repeated_heads=list(itertools.chain.from_iterable(plan.repeated_heads for plan in plans)),
        )

    @property
    def num_stages(self) -> int:
        return self._last.num_stages

    @property
    def newest(self) -> Any:
        return self._last.newest

    def compile(self, key: ProgramKey) -> Compiled:
        """Compiles the key's program for the stages that run it; several programs become one `_StagePrograms`."""
        if key.runs_on is RunsOn.LAST_STAGE:
            return self._last.compile(key) if self._last.stage.is_last else _on_another_host
        programs = [executor.compile(key) for executor in self.stages]
        if key.runs_on is RunsOn.EACH_STAGE:
            return _StagePrograms(programs, [], None)
        hidden = self._last.context.hidden_struct(key.num_tokens)
        links = [link and link.compile(hidden) for link in self._to_stages]
        return _StagePrograms(programs, links, self._onwards and self._onwards.compile(hidden))

    def run(self, key: ProgramKey, program: Compiled, *operands: Any) -> Any:
        if not isinstance(program, _StagePrograms):
            return self._last.run(key, program, *operands)
        if key.runs_on is RunsOn.EACH_STAGE:
            parts = zip(self.stages, program.of_stages, strict=True)
            results = [executor.run(key, of_stage, *operands) for executor, of_stage in parts]
            return [array for result in results if result is not None for array in result]
        hidden = None
        for executor, of_stage, link in zip(self.stages, program.of_stages, program.links, strict=True):
            state = executor.state
            state.handed_on = None if link is None else link(hidden)
            executor.run(key, of_stage, *operands)
            hidden, state.handed_on = state.hidden, None
            if executor is not self._last:
                state.forget_hidden()
        if program.onwards is not None:
            # Takes the place of the hidden states: an array that is ready once this host's stages are.
            self._last.state.hidden = program.onwards(hidden)
        return None

    def recover(self) -> None:
        for executor in self.stages:
            executor.recover()

    def close(self) -> None:
        for executor in self.stages:
            executor.close()

    @property
    def _last(self) -> DeviceExecutor:
        """The last of this host's stages."""
        return self.stages[-1]


class _StagePrograms(NamedTuple):
    """The programs of the stages, and the links over which hidden states come and go.

    Only programs in which stages hand on hidden states have links. The first stage's link is None.
    """

    of_stages: Sequence[Compiled]
    links: Sequence[HandOn | None]
    onwards: HandOn | None

    def __call__(self, *_: object) -> None:
        raise TypeError("the stages' programs are called one after the other")


def _handover(meshes: Sequence[jax.sharding.Mesh], index: int) -> Handover | None:
    """Returns the link from the stage before to the stage of this index, if both exist."""
    return Handover(meshes[index - 1], meshes[index]) if 0 < index < len(meshes) else None


def _on_another_host(*_: object) -> None:
    """Stands for a program of the last stage if another host has that stage."""
    raise RuntimeError("another host has the last stage")
