"""The device half of a step: a model, its caches and its compiled programs, and the calls of those programs.

A call is a program's key and plain int32 vectors. It knows nothing of requests: what one step leaves for the next
(caches, sampled tokens, hidden states) stays here, on the devices. So a host that is sent another one's calls, in
order, computes what that one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.block_programs import BlockPrograms, LoadKey, SaveKey
from jaxis.engine.execution.cache_specs import num_draft_caches
from jaxis.engine.execution.draft_program import DraftKey
from jaxis.engine.execution.kv_cache import CachePlan, make_kv_caches
from jaxis.engine.execution.model_arrays import ModelArrays, hidden_state_struct
from jaxis.engine.execution.programs import Program, ProgramCache
from jaxis.engine.execution.rank_programs import RankPrograms
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.execution.step_programs import (
    ForwardKey,
    GreedyStepKey,
    LogitsKey,
    SampleKey,
    StepPrograms,
    WholeKey,
)
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.errors import EngineError
from jaxis.kernels import native
from jaxis.models.common.interfaces import DraftsByChain, draft_of
from jaxis.parallel.stages import WHOLE, Stage

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


class Executor:
    """Runs a model's programs on this process' devices of a mesh.

    Attributes:
      mesh: Its devices, those of other processes included.
      plan: The caches' sizes.
      arrays: The model's.
      programs: Those that are compiled.
      step_programs: Compiles those of steps.
      block_programs: Compiles those that copy blocks.
      ranks: The data ranks of the mesh.
      is_native: Whether programs call native kernels.
      num_draft_caches: Caches of the layers that draft tokens; 0 without.
      num_seen_again: Newest tokens that the layers of a chain see again when the next ones are known; 0 for others.
      states_before: See `UndraftedStep`.
      stage: What of the model it is.
      caches: The layers'.
      last_tokens: The tokens that the last step sampled, i32 [max R] of each data rank.
      hidden, rows: Hidden states of the last call, and those to sample from; None once they were used.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: JaxModule,
        mesh: jax.sharding.Mesh,
        plan: CachePlan,
        *,
        on_compile: Callable[[Hashable], AbstractContextManager[None]],
        stage: Stage = WHOLE,
    ) -> None:
        """Allocates the caches.

        Args:
          vllm_config: The engine's configuration.
          model: Loaded.
          mesh: Where it was loaded to.
          plan: Of its caches.
          on_compile: `on_compile(key)` is a context manager entered while a step waits for a program.
          stage: What of the model it is.

        Raises:
          EngineError: No memory for the caches.
        """
        self.mesh, self.plan = mesh, plan
        self.stage = stage
        self._vocab_size: int = vllm_config.model_config.hf_config.get_text_config()["vocab_size"]
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        # On CPU, the host reads the device's memory.
        self._is_on_host = mesh.devices.flat[0].platform == "cpu"
        self.num_draft_caches = num_draft_caches(model)
        draft = draft_of(model)
        self.num_seen_again = draft.num_layers - 1 if isinstance(draft, DraftsByChain) else 0
        self.caches = make_kv_caches(plan.structs)
        with jax.set_mesh(mesh):
            self.arrays = ModelArrays(model, hidden_state_struct(vllm_config, mesh), has_head=stage.is_last)
            # Such kernels are compiled ahead of time, so that programs, which only call them, compile fast.
            self.is_native = native.usable()
        # Programs are traced on other threads, at times when there may be no caches: from their structs.
        self.step_programs = StepPrograms(
            self.arrays,
            mesh,
            caches=plan.structs,
            num_draft_caches=self.num_draft_caches,
            max_num_seqs=self._max_num_seqs,
            vocab_size=self._vocab_size,
            stage=stage,
        )
        self.ranks = RankPrograms(mesh)
        self.block_programs = BlockPrograms(plan.structs, plan.layer_groups, mesh)
        self.programs = ProgramCache(self._compile, on_compile)
        self._forget_last_tokens()

    def on_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """Has a function called, on another thread, when another host that this one needs is lost.

        Args:
          callback: The function.
          stall_seconds: How long such a host may be silent before it is lost.
        """

    def give_up_other_hosts(self, reason: str) -> None:
        """Takes other hosts that this one needs for lost, because of something that they cannot have noticed."""

    @property
    def silent_hosts(self) -> Sequence[str]:
        """Other hosts that this one needs and has not heard of for some time."""
        return ()

    def end_other_hosts(self) -> None:
        """Ends those, when no more calls will come."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages, those of other hosts included."""
        return self.stage.num_stages

    @property
    def stages(self) -> Sequence[Executor]:
        """Those of the pipeline stages that this host has, in their order."""
        return [self]

    @property
    def num_parameters_elsewhere(self) -> int:
        """Parameters of the pipeline stages that this host has no part of."""
        return 0

    @property
    def weight_bytes_elsewhere(self) -> int:
        """Bytes of their weights, on all devices together."""
        return 0

    @property
    def whole_plan(self) -> CachePlan:
        """The plan of the caches of all `stages`."""
        return self.plan

    @property
    def newest(self) -> Any:
        """Arrays that are ready once this host's devices have done what was dispatched."""
        return self.last_tokens

    def forward(self, key: ForwardKey, packed: np.ndarray) -> None:
        """Dispatches the model over a step; keeps its hidden states.

        Args:
          key: The program.
          packed: By `pack_step`, of each data rank, one after the other.
        """
        program = self.programs.get(key)
        self._forget_hidden()  # so that their memory can be theirs again
        own, drafting = self._divided_caches()
        own, self.hidden, self.rows, (self.aux, self._aux_rows, self.states_before) = program(
            self.arrays.arrays, own, self.last_tokens, self.ranks.place(packed)
        )
        self.caches = [*own, *drafting]

    def sample(self, key: SampleKey, parameters: np.ndarray | None) -> SamplerOutput:
        """Dispatches the sampler over the last hidden states of the step that was forwarded.

        Args:
          key: The program.
          parameters: By `SamplingPacker`; None if every sequence takes its most likely token.

        Returns:
          What the sequences sampled, rank by rank.
        """
        program = self.programs.get(key)
        placed = None if parameters is None else self.ranks.place(parameters)
        sampled, self.last_tokens = program(self.arrays.head_arrays, self.rows, placed)
        self.rows = None
        if not self.num_draft_caches:
            self.hidden = None
        self._start_copy_to_host(sampled)
        return sampled

    @property
    def sampled_states(self) -> list[jax.Array]:
        """What layers that draft take of the rows that were sampled from in the step that was dispatched last.

        Hidden states [S, E] and auxiliary ones; to be asked for before the step is sampled.
        """
        assert self.rows is not None
        return [self.rows, *self._aux_rows]

    def draft(
        self,
        key: DraftKey,
        packed_step: np.ndarray,
        packed: np.ndarray,
        states: Sequence[np.ndarray] | None = None,
    ) -> jax.Array:
        """Dispatches the draft layers over a step, and their drafts.

        Args:
          key: The program.
          packed_step: By `pack_step`.
          packed: By `pack_drafting`.
          states: The hidden states of the step's tokens [T, E], and auxiliary ones; None: those of the step that was
            dispatched last, with `packed_step`.

        Returns:
          The drafts, i32 [N, num_drafts].
        """
        program = self.programs.get(key)
        own, drafting = self._divided_caches()
        hidden, aux = (self.hidden, self.aux) if states is None else (states[0], states[1:])
        updated, drafts = program(self.arrays.arrays, drafting, hidden, list(aux), packed_step, packed)
        self.caches = [*own, *updated]
        return drafts

    def greedy_step(self, key: GreedyStepKey, packed: np.ndarray) -> SamplerOutput:
        """Dispatches model and sampler over the greedy decode of one sequence."""
        program = self.programs.get(key)
        self._forget_hidden()
        own, drafting = self._divided_caches()
        own, sampled, self.last_tokens, states = program(self.arrays.arrays, own, self.last_tokens, packed)
        self.caches = [*own, *drafting]
        if states:
            self.rows, *self.aux = states
            self.hidden, self._aux_rows, self.states_before = self.rows, self.aux, []
        return sampled

    def _divided_caches(self) -> tuple[list[Any], list[Any]]:
        """The model's own caches, and those of the layers that draft."""
        first = len(self.caches) - self.num_draft_caches
        return self.caches[:first], self.caches[first:]

    def whole(self, key: WholeKey, input_ids: np.ndarray, num_tokens: int) -> None:
        """Dispatches the model over one whole sequence, without caches; keeps its hidden states.

        Args:
          key: The program.
          input_ids: int32 [T], padded.
          num_tokens: Without the padding.
        """
        program = self.programs.get(key)
        self._forget_hidden()
        self.hidden = program(self.arrays.arrays, input_ids, np.int32(num_tokens))

    def logits(
        self, key: LogitsKey, rows: np.ndarray, targets: np.ndarray | None = None
    ) -> jax.Array | TokenLogprobs[jax.Array]:
        """Dispatches the head over some rows of the hidden states that are kept.

        Args:
          key: The program.
          rows: int32 [LOGITS_CHUNK_ROWS], counted through the hidden states of all data ranks.
          targets: int32 [LOGITS_CHUNK_ROWS], if log-probabilities of these tokens are wanted, not logits.
        """
        program = self.programs.get(key)
        return program(self.arrays.head_arrays, self.hidden, rows, *(() if targets is None else (targets,)))

    def block_structs(self, key: LoadKey) -> list[Any]:
        """What `load_blocks` takes: arrays, or tuples of them, of all data ranks."""
        return self.block_programs.block_structs(key.group, key.num_blocks)

    def save_blocks(self, key: SaveKey, block_ids: np.ndarray) -> list[Any]:
        """Dispatches a copy of blocks as they are after the calls so far.

        Args:
          key: The program.
          block_ids: int32 [D * n], n of each data rank.

        Returns:
          For each array of the group's caches, [D * n, ...].
        """
        saved = self.programs.get(key)([self.caches[i] for i in self.block_programs.layers(key.group)], block_ids)
        if not self._is_on_host:
            for array in jax.tree.leaves(saved):
                array.copy_to_host_async()
        return saved

    def load_blocks(self, key: LoadKey, block_ids: np.ndarray, blocks: list[Any]) -> None:
        """Dispatches a copy into blocks, which the calls that follow read.

        Args:
          key: The program.
          block_ids: int32 [D * n], n of each data rank; of no block where there is none to copy.
          blocks: As `save_blocks` returns them.
        """
        layers = self.block_programs.layers(key.group)
        program = self.programs.get(key)
        caches = program([self.caches[i] for i in layers], block_ids, blocks)
        for i, cache in zip(layers, caches, strict=True):
            self.caches[i] = cache

    def recover(self) -> None:
        """Makes new caches after a step that failed or was interrupted midway.

        The outputs of that step may be missing, or hold an error that surfaces only when they are read.
        """
        self.caches = []
        self.caches = make_kv_caches(self.plan.structs)
        self._forget_last_tokens()

    def close(self) -> None:
        """Frees the caches, weights and programs."""
        self.programs.close()
        self.arrays.release()
        self.caches = []
        self._forget_hidden()

    def _compile(self, key: Hashable) -> Program:
        """Compiles a program, on a worker thread."""
        if isinstance(key, SaveKey | LoadKey):
            return self.block_programs.compile(key)
        return self.step_programs.compile(key)

    def _forget_hidden(self) -> None:
        self.hidden: jax.Array | None = None
        self.rows: jax.Array | None = None
        self.aux: list[jax.Array] = []
        self._aux_rows: list[jax.Array] = []
        self.states_before: list[jax.Array] = []

    def _forget_last_tokens(self) -> None:
        self._forget_hidden()
        last = self.ranks.struct((self._max_num_seqs,), jnp.int32)
        self.last_tokens = cast(Any, jnp.zeros)(last.shape, last.dtype, device=last.sharding)

    def _start_copy_to_host(self, sampled: SamplerOutput) -> None:
        if not self._is_on_host:
            for array in jax.tree.leaves(sampled):
                array.copy_to_host_async()
