"""Runs steps on the devices: packs a scheduled batch, dispatches the compiled programs, returns the tokens.

A step is two programs, the model over T tokens and the sampler over R sequences, so that the few sampler variants do
not multiply with the many token counts. Only the greedy decode of a single sequence, whose fixed costs show most, is
one program. Dispatch returns at once; the sampled tokens stay on the device for the next step, and are copied to the
host when asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.compiled_features import CompiledFeatures
from jaxis.engine.execution.kv_cache import make_kv_caches, plan_kv_caches
from jaxis.engine.execution.model_arrays import ModelArrays, hidden_state_struct
from jaxis.engine.execution.programs import CompileWait, ProgramCache
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.execution.sampling_batch import SamplerFeatures, build_sampling_arrays, sampler_features
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.execution.step_inputs import StepShape, pack_step
from jaxis.engine.execution.step_programs import (
    LOGITS_CHUNK_ROWS,
    ForwardKey,
    GreedyStepKey,
    LogitsKey,
    SampleKey,
    StepPrograms,
    WholeKey,
)
from jaxis.engine.execution.step_shapes import StepShapes
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.engine.scheduling.scheduler import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import SequenceId
from jaxis.kernels import native
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule

SamplingStates = Mapping[SequenceId, SequenceSampling]


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was dispatched to the devices.

    Attributes:
      output: What was scheduled.
      sampled: Device arrays, row i for entry i; None if no sequence samples in the step.
      prompt_logprobs: For entries that want them: (entry's index, log-probabilities of its chunk's next tokens).
    """

    output: SchedulerOutput
    sampled: SamplerOutput | None
    prompt_logprobs: Sequence[tuple[int, TokenLogprobs[np.ndarray]]]

    def token_ids(self) -> list[int]:
        """The sampled token of each entry (meaningless where it does not sample); waits for the device."""
        if self.sampled is None:
            return [0] * len(self.output.scheduled)
        return np.asarray(self.sampled.token_ids)[: len(self.output.scheduled)].tolist()

    def logprobs(self) -> TokenLogprobs[np.ndarray] | None:
        """The sampled tokens' log-probabilities as numpy arrays, if any sequence wants them."""
        if self.sampled is None or self.sampled.logprobs is None:
            return None
        return TokenLogprobs(*map(np.asarray, self.sampled.logprobs))


@dataclass(frozen=True)
class ForwardedStep:
    """A step whose model was dispatched, but not yet its sampler.

    Attributes:
      output: What was scheduled.
      prompt_logprobs: As in DispatchedStep.
      run_sampler: Dispatches the sampler.
    """

    output: SchedulerOutput
    prompt_logprobs: Sequence[tuple[int, TokenLogprobs[np.ndarray]]]
    run_sampler: Callable[[SamplingStates], SamplerOutput]

    def sample(self, sampling: SamplingStates) -> DispatchedStep:
        """Sends the step's sampler to the devices; the next step can be forwarded after that.

        Args:
          sampling: Each scheduled sequence's sampling state; a sequence that has ended since may be missing.
        """
        sampled = None
        if any(entry.samples for entry in self.output.scheduled):
            sampled = self.run_sampler(sampling)
        return DispatchedStep(self.output, sampled, self.prompt_logprobs)


class Runner:
    """The model, its KV caches and its compiled programs.

    Attributes:
      num_blocks: Blocks of the KV cache for the layers of each span, the span that keeps most first.
      kv_bytes_per_block: Bytes of one such block in all its layers, by span.
      num_state_slots: Slots of the recurrent states; None if no layer has any.
      bytes_per_state_slot: Bytes of a slot in all layers.
      max_model_len: The configured one, shortened if the cache cannot hold a sequence that long.
      vocab_size: V.
      on_step_logits: For verification: called with each step's output and its tokens' logits, float32 [T, V]. None, the
        default, computes no such logits.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: JaxModule,
        mesh: jax.sharding.Mesh,
        *,
        on_compile: Callable[[Hashable], AbstractContextManager[None]],
    ) -> None:
        """Allocates the caches.

        Args:
          vllm_config: The engine's configuration.
          model: Loaded.
          mesh: Where it was loaded to.
          on_compile: `on_compile(key)` is a context manager entered while a step waits for a program.

        Raises:
          EngineError: No memory for the cache.
          ConfigError: The model's kv heads cannot be spread over the mesh.
        """
        self.mesh = mesh
        self.vllm_config = vllm_config
        self.vocab_size: int = vllm_config.model_config.hf_config.get_text_config()["vocab_size"]
        self.on_step_logits: Callable[[SchedulerOutput, np.ndarray], None] | None = None
        self._replicated = NamedSharding(mesh, PartitionSpec())
        # On CPU, the host reads the device's memory.
        self._is_on_host = mesh.devices.flat[0].platform == "cpu"

        plan = plan_kv_caches(model, vllm_config, mesh)
        self.num_blocks, self.max_model_len = plan.num_blocks, plan.max_model_len
        self.kv_bytes_per_block = plan.bytes_per_block
        self.num_state_slots, self.bytes_per_state_slot = plan.num_state_slots, plan.bytes_per_slot
        # Programs are traced on other threads, at times when there may be no caches.
        self._cache_structs = plan.structs
        self._caches = make_kv_caches(self._cache_structs)
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        with jax.set_mesh(mesh):
            self._arrays = ModelArrays(model, hidden_state_struct(vllm_config, mesh))
            # Such kernels are compiled ahead of time, so that programs, which only call them, compile fast.
            self._is_native = native.usable()
        self._step_programs = StepPrograms(
            self._arrays, mesh, caches=self._cache_structs, max_num_seqs=self._max_num_seqs, vocab_size=self.vocab_size
        )
        self._step_shapes = StepShapes(
            vllm_config,
            self.num_blocks,
            self.max_model_len,
            has_states=self.num_state_slots is not None,
            compiles_fast=self._is_native,
        )
        self._forget_last_tokens()
        self._ended_sampling = SequenceSampling(
            SamplingParams(temperature=0.0),
            prompt_token_ids=(),
            output_token_ids=[],
            vocab_size=self.vocab_size,
            seed=0,
        )
        self._programs = ProgramCache(self._step_programs.compile, on_compile)
        self._compiled_features = CompiledFeatures()

    @property
    def model(self) -> JaxModule:
        """The model, with the weights that the runner has."""
        return self._arrays.model

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's arrays on all devices together."""
        return self._arrays.num_bytes

    def bytes_by_weight(self) -> dict[str, int]:
        """Bytes of each of the model's arrays, as it is in memory, by its dotted name."""
        return self._arrays.bytes_by_name()

    @property
    def last_compile_wait(self) -> CompileWait | None:
        """When a step last waited for a program, if one did."""
        return self._programs.last_wait

    def precompile(self, num_tokens: int, *, greedy: bool) -> None:
        """Starts compiling, in the background, the programs for a step of this many tokens.

        Args:
          num_tokens: One for each sequence.
          greedy: Whether all sequences take the most likely tokens, with nothing else asked for.
        """
        shape = self.step_shape(num_tokens)
        if greedy and self._can_be_one_program(num_tokens):
            self._programs.precompile(GreedyStepKey(shape))
            return
        self._programs.precompile(ForwardKey(shape))
        self._programs.precompile(SampleKey(shape.num_seqs, SamplerFeatures()))

    def step_shape(self, num_tokens: int) -> StepShape:
        """The smallest compiled shape that holds this many tokens."""
        return self._step_shapes.of(num_tokens)

    def dispatch(self, output: SchedulerOutput, sampling: SamplingStates) -> DispatchedStep:
        """Sends a step's model and sampler to the devices, and returns without waiting for them."""
        if self._can_be_one_program(output.num_tokens) and self.on_step_logits is None:
            [entry] = output.scheduled
            state = sampling.get(entry.sequence.seq_id)
            if state is not None and state.takes_argmax and entry.samples and not _has_prompt_logprobs(entry):
                return self._greedy_step(output)
        return self.forward(output).sample(sampling)

    def _can_be_one_program(self, num_tokens: int) -> bool:
        return self._is_native and num_tokens == 1

    def _greedy_step(self, output: SchedulerOutput) -> DispatchedStep:
        self._check_is_sampled()
        shape = self.step_shape(1)
        program = self._programs.get(GreedyStepKey(shape))
        packed = pack_step(output, shape, self._last_rows)
        self._caches, sampled, self._last_tokens = program(self._arrays.arrays, self._caches, self._last_tokens, packed)
        self._last_rows = {output.scheduled[0].sequence.seq_id: 0}
        return DispatchedStep(output, sampled, ())

    def _start_copy_to_host(self, sampled: SamplerOutput) -> None:
        if not self._is_on_host:
            for array in jax.tree.leaves(sampled):
                array.copy_to_host_async()

    def forward(self, output: SchedulerOutput) -> ForwardedStep:
        """Sends a step's model to the devices.

        Raises:
          RuntimeError: The previous step samples tokens that this one may need, and its sampler was not dispatched.
        """
        self._check_is_sampled()
        shape = self.step_shape(output.num_tokens)
        if output.num_decodes < len(output.scheduled):
            # The next step decodes the same number of sequences.
            is_greedy = all(entry.sequence.sampling_params.greedy for entry in output.scheduled)
            self.precompile(len(output.scheduled), greedy=is_greedy)
        hidden, rows = self._forward(output, shape)
        if any(entry.samples for entry in output.scheduled):
            self._unsampled = output
        if self.on_step_logits is not None:
            self.on_step_logits(output, self._logits(hidden, np.arange(output.num_tokens)))
        prompt_logprobs = [
            (i, self._prompt_logprobs(hidden, output, i))
            for i, entry in enumerate(output.scheduled)
            if _has_prompt_logprobs(entry)
        ]
        return ForwardedStep(output, prompt_logprobs, functools.partial(self._sample, output, rows))

    def paged_logits(self, output: SchedulerOutput) -> np.ndarray:
        """Runs a step without sampling; returns its tokens' logits, float32 [T, V]."""
        hidden, _ = self._forward(output, self.step_shape(output.num_tokens))
        return self._logits(hidden, np.arange(output.num_tokens))

    def whole_logits(self, token_ids: Sequence[int], rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Logits, float32 [T, V], of one whole sequence without a cache; of these rows only, where given."""
        hidden = self._whole_hidden(token_ids)
        return self._logits(hidden, np.arange(len(token_ids)) if rows is None else np.asarray(rows))

    def iterate_whole_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """As `whole_logits`, in parts of up to LOGITS_CHUNK_ROWS rows."""
        yield from self._logits_in_chunks(self._whole_hidden(token_ids), np.arange(len(token_ids)))

    def _whole_hidden(self, token_ids: Sequence[int]) -> jax.Array:
        """Hidden states [T or more, E] of one whole sequence without a cache."""
        num_tokens = len(token_ids)
        padded = self._step_shapes.padded(num_tokens)
        input_ids = np.zeros(padded, np.int32)
        input_ids[:num_tokens] = token_ids
        program = self._programs.get(WholeKey(padded))
        return program(self._arrays.arrays, *jax.device_put((input_ids, np.int32(num_tokens)), self._replicated))

    def recover(self) -> None:
        """Makes the runner usable after a step that failed or was interrupted midway."""
        # The outputs of that step may be missing, or hold an error that surfaces only when they are read.
        self._caches = []
        self._caches = make_kv_caches(self._cache_structs)
        self._forget_last_tokens()

    def close(self) -> None:
        """Frees the caches, weights and programs."""
        self._programs.close()
        self._arrays.release()
        self._caches = []

    def _check_is_sampled(self) -> None:
        if self._unsampled is not None:
            raise RuntimeError("the step before must be sampled first")

    def _forget_last_tokens(self) -> None:
        self._unsampled: SchedulerOutput | None = None
        self._last_tokens = jax.device_put(np.zeros(self._max_num_seqs, np.int32), self._replicated)
        self._last_rows: dict[SequenceId, int] = {}

    def _forward(self, output: SchedulerOutput, shape: StepShape) -> tuple[jax.Array, jax.Array]:
        """Dispatches the model; returns the hidden states of the step's tokens [T, E] and of each sequence's last."""
        program = self._programs.get(ForwardKey(shape))
        packed = pack_step(output, shape, self._last_rows)
        self._caches, hidden, rows = program(self._arrays.arrays, self._caches, self._last_tokens, packed)
        return hidden, rows

    def _sample(self, output: SchedulerOutput, rows: jax.Array, sampling: SamplingStates) -> SamplerOutput:
        """Dispatches the sampler over each sequence's last hidden state, [R, E]."""
        sequences = [sampling.get(entry.sequence.seq_id, self._ended_sampling) for entry in output.scheduled]
        num_rows, features, parameters = rows.shape[0], SamplerFeatures(), None
        if not all(sequence.takes_argmax for sequence in sequences):
            # The scheduler counts the token that this step samples as in flight already.
            num_inflight = [max(entry.sequence.num_inflight_tokens - 1, 0) for entry in output.scheduled]
            arrays = build_sampling_arrays(sequences, num_rows, self.vocab_size, num_inflight)
            features = sampler_features(arrays, sequences, self.vocab_size)
            if features != SamplerFeatures():
                features = self._compiled_features.choose(num_rows, features)
                parameters = arrays.widened(features, self.vocab_size).pack()
        program = self._programs.get(SampleKey(num_rows, features))
        sampled, self._last_tokens = program(self._arrays.head_arrays, rows, parameters)
        self._start_copy_to_host(sampled)
        self._last_rows = {entry.sequence.seq_id: i for i, entry in enumerate(output.scheduled) if entry.samples}
        self._unsampled = None
        return sampled

    def _logits(self, hidden: jax.Array, rows: np.ndarray) -> np.ndarray:
        """Logits of these rows of hidden states [T, E]."""
        return np.concatenate(list(self._logits_in_chunks(hidden, rows)))

    def _logits_in_chunks(self, hidden: jax.Array, rows: np.ndarray) -> Iterator[np.ndarray]:
        program = self._programs.get(LogitsKey(hidden.shape[0], targets=False))
        for start in range(0, len(rows), LOGITS_CHUNK_ROWS):
            chunk = _chunk(rows[start:].astype(np.int32))
            yield np.asarray(program(self._arrays.head_arrays, hidden, chunk))[: len(rows) - start]

    def _prompt_logprobs(self, hidden: jax.Array, output: SchedulerOutput, index: int) -> TokenLogprobs[np.ndarray]:
        """Log-probabilities of the token after each of the entry's prompt tokens, while that is a prompt token too."""
        entry = output.scheduled[index]
        first_row = sum(earlier.num_tokens for earlier in output.scheduled[:index])
        targets = entry.sequence.prompt_token_ids[entry.start + 1 : entry.start + entry.num_tokens + 1]
        program = self._programs.get(LogitsKey(hidden.shape[0], targets=True))
        chunks = []
        for start in range(0, len(targets), LOGITS_CHUNK_ROWS):
            rows = _chunk(np.arange(first_row + start, first_row + len(targets), dtype=np.int32))
            chunks.append(
                program(self._arrays.head_arrays, hidden, rows, _chunk(np.asarray(targets[start:], np.int32)))
            )
        fields = zip(*chunks, strict=True)
        return TokenLogprobs(
            *(np.concatenate([np.asarray(part) for part in parts])[: len(targets)] for parts in fields)
        )


def _has_prompt_logprobs(entry: ScheduledSequence) -> bool:
    """Whether a step's logits are also wanted for the log-probabilities of the prompt."""
    sequence = entry.sequence
    return sequence.sampling_params.prompt_logprobs is not None and entry.start + 1 < sequence.num_prompt_tokens


def _chunk(values: np.ndarray) -> np.ndarray:
    """The first LOGITS_CHUNK_ROWS values, padded with zeros."""
    chunk = np.zeros(LOGITS_CHUNK_ROWS, values.dtype)
    chunk[: min(len(values), LOGITS_CHUNK_ROWS)] = values[:LOGITS_CHUNK_ROWS]
    return chunk
