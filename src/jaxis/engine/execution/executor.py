"""Execution of a model's programs on the devices of one mesh.

`pipeline.py` and `hosts/leading_executor.py` join several executors. A call is a program's key, its compiled program,
and plain vectors of the host. A call knows nothing of requests, and the arrays that one step leaves for the next stay
on the devices. So a host that repeats another host's calls, in order, computes the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax

from jaxis.engine.execution.cache_specs import num_draft_caches
from jaxis.engine.execution.device_state import DeviceState
from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.model_arrays import ModelArrays, hidden_state_struct
from jaxis.engine.execution.program_context import ProgramContext
from jaxis.engine.execution.program_files import can_keep, compiled
from jaxis.engine.execution.program_key import Compiled, ProgramKey
from jaxis.engine.execution.trace_inputs import model_inputs
from jaxis.kernels import native
from jaxis.parallel.stages import WHOLE, Stage

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


class Executor(Protocol):
    """Holds a model, or this host's part of one, and runs its programs.

    Attributes:
      plan: The caches' sizes, of all `stages`.
      num_stages: Pipeline stages of the model, those of other hosts included.
      stages: The stages of this host, in their order; one for a model that is not divided.
    """

    @property
    def plan(self) -> CachePlan: ...

    @property
    def num_stages(self) -> int: ...

    @property
    def stages(self) -> Sequence[DeviceExecutor]: ...

    @property
    def newest(self) -> Any:
        """The arrays that are ready once this host's devices have done all dispatched work."""
        ...

    def compile(self, key: ProgramKey) -> Compiled:
        """Compiles the program of a key. Takes seconds, and may be called from several threads."""
        ...

    def run(self, key: ProgramKey, program: Compiled, *operands: Any) -> Any:
        """Dispatches the compiled `program` of a key; returns at once the result of `ProgramKey.run`."""
        ...

    def recover(self) -> None:
        """Makes new caches after a call that failed or was interrupted midway."""
        ...

    def close(self) -> None:
        """Frees the caches and weights."""
        ...


class DeviceExecutor:
    """The `Executor` of a model, or of one of its pipeline stages, on the devices of one mesh.

    The model must have been loaded to these devices.

    Attributes:
      plan: The caches' sizes.
      stage: This part of the model.
      state: Arrays that the programs leave on the devices.
      is_native: True if programs call native kernels.

    Raises:
      EngineError: Devices have no memory for the caches.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: JaxModule,
        mesh: jax.sharding.Mesh,
        plan: CachePlan,
        stage: Stage = WHOLE,
    ) -> None:
        self.plan, self.stage = plan, stage
        with jax.set_mesh(mesh):
            arrays = ModelArrays(model, hidden_state_struct(vllm_config, mesh), has_head=stage.is_last)
            # Native kernels are compiled ahead of time, so programs that only call them compile fast.
            self.is_native = native.usable()
        self._inputs = model_inputs(model) if self.is_native and can_keep(mesh) else None
        self.state = DeviceState(
            ProgramContext(
                model=arrays,
                mesh=mesh,
                caches=plan.structs,
                layer_groups=plan.layer_groups,
                num_draft_caches=num_draft_caches(model),
                max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
                vocab_size=vllm_config.model_config.hf_config.get_text_config()["vocab_size"],
                stage=stage,
            )
        )

    @property
    def context(self) -> ProgramContext:
        """The context that the programs are compiled for."""
        return self.state.context

    def set_model(self, model: JaxModule) -> None:
        """Replaces the weights of the compiled programs by others of the same shapes and types.

        No step may be in flight. Values cached by earlier steps belong to the old weights.

        Raises:
          ConfigError: The weights have other shapes or types; nothing has changed.
        """
        old = self.context.model
        with jax.set_mesh(self.context.mesh):
            arrays = ModelArrays(model, old.hidden_states, has_head=self.stage.is_last)
            old.check_alike(arrays)
        self._inputs = None  # the new weights may be of a model that was changed
        self.state.context = dataclasses.replace(self.context, model=arrays)

    def unload(self, *, keep: bool) -> None:
        """Frees the caches, the last step's arrays, and the weights as `ModelArrays.unload` does."""
        self.state.caches = []
        self.state.forget_hidden()
        self.context.model.unload(keep=keep)

    @property
    def num_stages(self) -> int:
        return self.stage.num_stages

    @property
    def stages(self) -> Sequence[DeviceExecutor]:
        return [self]

    @property
    def newest(self) -> Any:
        return self.state.newest

    def compile(self, key: ProgramKey) -> Compiled:
        return compiled(key, self.context, self._inputs)

    def run(self, key: ProgramKey, program: Compiled, *operands: Any) -> Any:
        return key.run(program, self.state, *operands)

    def recover(self) -> None:
        self.state.recover()

    def close(self) -> None:
        self.state.release()
