"""Runs steps on the devices: packs a scheduled batch, dispatches the compiled programs, hands back what they sample.

A step is two programs, the model over T tokens and the sampler over R requests, so that the few sampler variants do
not multiply with the many token counts. Dispatch returns at once; the tokens stay on the device for the next step and
are read when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.kv_cache import (
    block_bytes,
    kv_cache_specs,
    make_kv_caches,
    num_cache_blocks,
)
from jaxis.engine.execution.programs import CompileWait, ProgramCache
from jaxis.engine.execution.request_sampling import RequestSampling
from jaxis.engine.execution.sampler import SamplerOutput, TokenLogprobs, sample, token_logprobs
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays, build_sampling_arrays
from jaxis.engine.execution.step_inputs import StepShape, pack_step, unpack_step
from jaxis.engine.scheduling.scheduler import SchedulerOutput
from jaxis.kernels import native
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule

# Rows whose logits are in memory at once when logits of many rows are wanted.
LOGITS_CHUNK_ROWS = 64
SMALLEST_PADDED_TOKENS = 8  # but for one alone


@dataclass(frozen=True)
class ForwardKey:
    """Program: the model over a step."""

    shape: StepShape


@dataclass(frozen=True)
class SampleKey:
    """Program: logits and sampling for R requests."""

    num_requests: int
    features: SamplerFeatures


@dataclass(frozen=True)
class LogitsKey:
    """Program: logits of a chunk of a step's rows (`targets` False), or their log-probabilities of given tokens."""

    num_tokens: int
    targets: bool


@dataclass(frozen=True)
class WholeKey:
    """Program: hidden states of one whole sequence, without a cache."""

    num_tokens: int


@dataclass(frozen=True)
class ForwardedStep:
    """A step of which the model is on its way, and the sampler is not yet.

    Attributes:
      output: What was scheduled.
      rows: Hidden states of each entry's last token, [R, E] on the device.
      prompt_logprobs: As in DispatchedStep.
    """

    output: SchedulerOutput
    rows: jax.Array
    prompt_logprobs: Sequence[tuple[int, TokenLogprobs]]


@dataclass(frozen=True)
class DispatchedStep:
    """A step on its way.

    Attributes:
      output: What was scheduled.
      sampled: Device arrays, row i for entry i; None if no request samples in the step.
      prompt_logprobs: For entries that want them: (entry's index, log-probabilities of its chunk's next tokens).
    """

    output: SchedulerOutput
    sampled: SamplerOutput | None
    prompt_logprobs: Sequence[tuple[int, TokenLogprobs]]

    def token_ids(self) -> list[int]:
        """The sampled token of each entry (meaningless where it does not sample); waits for the device."""
        if self.sampled is None:
            return [0] * len(self.output.scheduled)
        return np.asarray(self.sampled.token_ids)[: len(self.output.scheduled)].tolist()

    def logprobs(self) -> TokenLogprobs | None:
        """The sampled tokens' log-probabilities as numpy arrays, if any request wants them."""
        if self.sampled is None or self.sampled.logprobs is None:
            return None
        return jax.tree.map(np.asarray, self.sampled.logprobs)


class Runner:
    """The model, its KV caches and its compiled programs.

    Attributes:
      num_blocks: Blocks of the KV cache for the layers of each span, that which keeps most first.
      kv_bytes_per_block: Bytes of one such block in all its layers, by span.
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
        on_compile: Callable[[Any], Any],
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

        cache_config = vllm_config.cache_config
        self._specs = [spec.on_devices(mesh.shape["model"]) for spec in kv_cache_specs(model, vllm_config)]
        self._cache_dtype = cache_config.cache_dtype or vllm_config.model_config.dtype
        self.kv_bytes_per_block = block_bytes(self._specs, cache_config.block_size, self._cache_dtype)
        self.num_blocks, self.max_model_len = num_cache_blocks(vllm_config, self.kv_bytes_per_block, mesh)
        self._make_caches()
        # Programs are traced on other threads, at times when there may be no caches.
        self._abstract_caches = _abstract(self._caches)

        self._graphdef, state = nnx.split(model)
        self._params, self._treedef = jax.tree.flatten(state)
        self._head_indices = self._read_by_head()
        self._head_params = [self._params[i] for i in self._head_indices]
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._max_blocks = -(-self.max_model_len // cache_config.block_size)
        self._step_shapes: dict[int, StepShape] = {}
        self._forget_last_tokens()
        self._ended_sampling = RequestSampling(
            SamplingParams(temperature=0.0),
            prompt_token_ids=(),
            output_token_ids=[],
            vocab_size=self.vocab_size,
            seed=0,
        )
        with jax.set_mesh(mesh):
            # Native kernels are compiled already: a program only calls them.
            self._compiles_fast = native.usable()
        self._programs = ProgramCache(self._compile, on_compile)

    @property
    def model(self) -> JaxModule:
        """The model, with the weights that the runner has."""
        return self._model(self._params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's arrays on all devices together."""
        return sum(shard.data.nbytes for array in self._params for shard in array.addressable_shards)

    @property
    def last_compile_wait(self) -> CompileWait | None:
        """When a step last waited for a program, if one did."""
        return self._programs.last_wait

    def prepare(self, num_tokens: int) -> None:
        """Begins to compile what a step of this many tokens and greedy requests needs."""
        shape = self.step_shape(num_tokens)
        self._programs.prepare(ForwardKey(shape))
        self._programs.prepare(SampleKey(shape.num_requests, SamplerFeatures()))

    def step_shape(self, num_tokens: int) -> StepShape:
        """The compiled shape that holds this many tokens, the smallest of few."""
        limit = self.vllm_config.scheduler_config.max_num_batched_tokens
        padded = self._padded(num_tokens)
        padded = max(min(padded, limit), num_tokens)
        if padded not in self._step_shapes:
            block_size, spans = self.vllm_config.cache_config.block_size, tuple(self.num_blocks)
            shape = StepShape(padded, min(padded, self._max_num_seqs), self._max_blocks, block_size, spans)
            self._step_shapes[padded] = shape
        return self._step_shapes[padded]

    def _padded(self, num_tokens: int) -> int:
        """A power of two, or, where programs compile fast enough for more of them, half as much again."""
        power = 1 << (num_tokens - 1).bit_length()
        if self._compiles_fast:
            return power * 3 // 4 if power > SMALLEST_PADDED_TOKENS and num_tokens <= power * 3 // 4 else power
        return 1 if num_tokens == 1 else max(SMALLEST_PADDED_TOKENS, power)

    def dispatch(self, output: SchedulerOutput, sampling: Mapping[str, RequestSampling]) -> DispatchedStep:
        """Sends a step to the devices and returns without waiting for it: `forward`, then `sample`."""
        return self.sample(self.forward(output), sampling)

    def forward(self, output: SchedulerOutput) -> ForwardedStep:
        """Sends a step's model to the devices; nothing else but `sample` may come next."""
        shape = self.step_shape(output.num_tokens)
        if output.num_decodes < len(output.scheduled):
            self.prepare(len(output.scheduled))  # decodes of as many requests come next
        hidden, rows = self._forward(output, shape)
        if self.on_step_logits is not None:
            self.on_step_logits(output, self._logits(hidden, np.arange(output.num_tokens)))
        prompt_logprobs = [
            (i, self._prompt_logprobs(hidden, output, i))
            for i, entry in enumerate(output.scheduled)
            if entry.request.sampling_params.prompt_logprobs is not None
            and entry.start + 1 < entry.request.num_prompt_tokens
        ]
        return ForwardedStep(output, rows, prompt_logprobs)

    def sample(self, step: ForwardedStep, sampling: Mapping[str, RequestSampling]) -> DispatchedStep:
        """Sends a step's sampler to the devices.

        Args:
          step: From `forward`.
          sampling: Each scheduled request's sampling state, by request id; one that has ended since needs none.
        """
        sampled = None
        if any(entry.samples for entry in step.output.scheduled):
            sampled = self._sample(step.output, step.rows, sampling)
        for array in jax.tree.leaves((sampled, step.prompt_logprobs)):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
        return DispatchedStep(step.output, sampled, step.prompt_logprobs)

    def paged_logits(self, output: SchedulerOutput) -> np.ndarray:
        """Runs a step without sampling; returns its tokens' logits, float32 [T, V]."""
        hidden, _ = self._forward(output, self.step_shape(output.num_tokens))
        return self._logits(hidden, np.arange(output.num_tokens))

    def whole_logits(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """Logits, float32 [T, V], of one whole sequence without a cache; of these rows only, where given."""
        num_tokens = len(token_ids)
        padded = self._padded(num_tokens)
        input_ids = np.zeros(padded, np.int32)
        input_ids[:num_tokens] = token_ids
        program = self._programs.get(WholeKey(padded))
        hidden = program(self._params, *jax.device_put((input_ids, np.int32(num_tokens)), self._replicated))
        return self._logits(hidden, np.arange(num_tokens) if rows is None else np.asarray(rows))

    def bytes_by_weight(self) -> dict[str, int]:
        """Bytes of each of the model's arrays, as it is in memory, by its dotted name."""
        arrays, _ = jax.tree.flatten_with_path(jax.tree.unflatten(self._treedef, self._params))
        return {jax.tree_util.keystr(path, simple=True, separator="."): array.nbytes for path, array in arrays}

    def kv_cache_bytes(self) -> int:
        """Bytes of the KV caches of all layers."""
        return sum(array.nbytes for array in jax.tree.leaves(self._caches))

    def recover(self) -> None:
        """Makes the runner usable after a step that failed, or was interrupted, half-way."""
        # Whatever the step was to leave may be missing, or be an error that only shows when it is read.
        self._caches = []
        self._make_caches()
        self._forget_last_tokens()

    def close(self) -> None:
        """Gives the caches, weights and programs back."""
        self._programs.close()
        self._caches, self._params, self._head_params = [], [], []

    def _forget_last_tokens(self) -> None:
        self._last_tokens = jax.device_put(np.zeros(self._max_num_seqs, np.int32), self._replicated)
        self._last_rows: dict[str, int] = {}

    def _make_caches(self) -> None:
        block_size = self.vllm_config.cache_config.block_size
        self._caches = make_kv_caches(self._specs, self.num_blocks, block_size, self._cache_dtype, self.mesh)

    def _forward(self, output: SchedulerOutput, shape: StepShape) -> tuple[jax.Array, jax.Array]:
        """Dispatches the model; returns the hidden states of the step's tokens [T, E] and of each request's last."""
        program = self._programs.get(ForwardKey(shape))
        packed = pack_step(output, shape, self._last_rows)
        self._caches, hidden, rows = program(self._params, self._caches, self._last_tokens, packed)
        return hidden, rows

    def _sample(
        self, output: SchedulerOutput, rows: jax.Array, sampling: Mapping[str, RequestSampling]
    ) -> SamplerOutput:
        requests = [sampling.get(entry.request.request_id, self._ended_sampling) for entry in output.scheduled]
        num_rows, features, parameters = rows.shape[0], SamplerFeatures(), None
        if not all(request.takes_argmax for request in requests):
            # The scheduler counts the token that this step samples as in flight already.
            num_inflight = [max(entry.request.num_inflight_tokens - 1, 0) for entry in output.scheduled]
            arrays, features = build_sampling_arrays(requests, num_rows, self.vocab_size, num_inflight)
            if features != SamplerFeatures():
                parameters = arrays.pack()
        program = self._programs.get(SampleKey(num_rows, features))
        sampled, self._last_tokens = program(self._head_params, rows, parameters)
        self._last_rows = {entry.request.request_id: i for i, entry in enumerate(output.scheduled) if entry.samples}
        return sampled

    def _logits(self, hidden: jax.Array, rows: np.ndarray) -> np.ndarray:
        """Logits of these rows of hidden states [T, E], computed chunk by chunk."""
        program = self._programs.get(LogitsKey(hidden.shape[0], targets=False))
        chunks = []
        for start in range(0, len(rows), LOGITS_CHUNK_ROWS):
            chunk = _chunk(rows[start:].astype(np.int32))
            chunks.append(np.asarray(program(self._head_params, hidden, chunk)))
        return np.concatenate(chunks)[: len(rows)]

    def _prompt_logprobs(self, hidden: jax.Array, output: SchedulerOutput, index: int) -> TokenLogprobs:
        """Of the tokens that follow each of the entry's prompt tokens, as far as those stand in the prompt."""
        entry = output.scheduled[index]
        first_row = sum(earlier.num_tokens for earlier in output.scheduled[:index])
        targets = entry.request.prompt_token_ids[entry.start + 1 : entry.start + entry.num_tokens + 1]
        program = self._programs.get(LogitsKey(hidden.shape[0], targets=True))
        chunks = []
        for start in range(0, len(targets), LOGITS_CHUNK_ROWS):
            rows = _chunk(np.arange(first_row + start, first_row + len(targets), dtype=np.int32))
            chunks.append(program(self._head_params, hidden, rows, _chunk(np.asarray(targets[start:], np.int32))))
        return jax.tree.map(lambda *parts: np.concatenate([np.asarray(p) for p in parts])[: len(targets)], *chunks)

    # Programs. Each is traced over the flat list of the model's arrays, from which the model is put together inside.

    def _compile(self, key: Any) -> Any:
        lower = {
            ForwardKey: self._lower_forward,
            SampleKey: self._lower_sample,
            LogitsKey: self._lower_logits,
            WholeKey: self._lower_whole,
        }
        with jax.set_mesh(self.mesh):
            return lower[type(key)](key).compile()

    def _model(self, params: list[jax.Array]) -> JaxModule:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, params))

    def _read_by_head(self) -> list[int]:
        """Which of the model's arrays `compute_logits` reads: a call takes longer for each array that it is given."""
        with jax.set_mesh(self.mesh):
            jaxpr = jax.make_jaxpr(lambda params, rows: self._model(params).compute_logits(rows))(
                self._params, self._hidden(1)
            )
        read = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
        return [i for i in range(len(self._params)) if id(jaxpr.jaxpr.invars[i]) in read]

    def _head(self, head_params: list[jax.Array]) -> JaxModule:
        """The model, for its `compute_logits` only."""
        given = dict(zip(self._head_indices, head_params, strict=True))
        return self._model([given.get(i) for i in range(self._treedef.num_leaves)])

    def _lower_forward(self, key: ForwardKey) -> Any:
        def forward(
            params: list[jax.Array], caches: list[jax.Array], last_tokens: jax.Array, packed: jax.Array
        ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
            step = unpack_step(packed, key.shape, last_tokens)
            caches, hidden, _ = self._model(params)(caches, step.input_ids, step.attention_metadata)
            return caches, hidden, hidden[step.logits_rows]

        shardings = ([cache.sharding for cache in self._abstract_caches], self._replicated, self._replicated)
        packed = self._array((key.shape.packed_size,), jnp.int32)
        jitted = jax.jit(forward, donate_argnums=1, out_shardings=shardings)
        return jitted.lower(self._params, self._abstract_caches, self._last_tokens, packed)

    def _lower_sample(self, key: SampleKey) -> Any:
        num_requests, features = key.num_requests, key.features
        parameters = None
        if features != SamplerFeatures():
            parameters = self._array((SamplingArrays.packed_size(num_requests, features),), jnp.int32)
        greedy, _ = build_sampling_arrays([], num_requests, self.vocab_size)

        def run(
            params: list[jax.Array], rows: jax.Array, parameters: jax.Array | None
        ) -> tuple[SamplerOutput, jax.Array]:
            logits = self._replicate(self._head(params).compute_logits(rows))
            arrays = greedy if parameters is None else SamplingArrays.unpack(parameters, num_requests, features)
            sampled = sample(logits, arrays, features=features)
            last_tokens = jnp.zeros(self._max_num_seqs, jnp.int32).at[:num_requests].set(sampled.token_ids)
            return sampled, last_tokens

        jitted = jax.jit(run, out_shardings=self._replicated)
        return jitted.lower(self._head_params, self._hidden(num_requests), parameters)

    def _lower_logits(self, key: LogitsKey) -> Any:
        def logits(params: list[jax.Array], hidden: jax.Array, rows: jax.Array) -> jax.Array:
            return self._replicate(self._head(params).compute_logits(hidden[rows]))

        def logprobs(params: list[jax.Array], hidden: jax.Array, rows: jax.Array, targets: jax.Array) -> TokenLogprobs:
            return token_logprobs(logits(params, hidden, rows), targets, num_logprobs=MAX_LOGPROBS)

        rows = self._array((LOGITS_CHUNK_ROWS,), jnp.int32)
        operands = (self._head_params, self._hidden(key.num_tokens), rows)
        if key.targets:
            return jax.jit(logprobs, out_shardings=self._replicated).lower(*operands, rows)
        return jax.jit(logits, out_shardings=self._replicated).lower(*operands)

    def _lower_whole(self, key: WholeKey) -> Any:
        def whole(params: list[jax.Array], input_ids: jax.Array, num_tokens: jax.Array) -> jax.Array:
            metadata = AttentionMetadata(
                input_positions=jnp.arange(key.num_tokens, dtype=jnp.int32),
                block_tables=None,
                seq_lens=num_tokens[None],
                query_start_loc=jnp.stack([jnp.zeros_like(num_tokens), num_tokens]),
                request_distribution=jnp.asarray([0, 1, 1], jnp.int32),
            )
            _, hidden, _ = self._model(params)(None, input_ids, metadata)
            return hidden

        operands = (self._array((key.num_tokens,), jnp.int32), self._array((), jnp.int32))
        return jax.jit(whole, out_shardings=self._replicated).lower(self._params, *operands)

    def _replicate(self, logits: jax.Array) -> jax.Array:
        """Whole rows of logits on every device, so that each samples alike."""
        return jax.lax.with_sharding_constraint(logits, self._replicated)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)

    def _hidden(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        model_config = self.vllm_config.model_config
        return self._array((num_tokens, model_config.hf_config.get_text_config()["hidden_size"]), model_config.dtype)


def _chunk(values: np.ndarray) -> np.ndarray:
    """The first LOGITS_CHUNK_ROWS values, filled up with zeros."""
    chunk = np.zeros(LOGITS_CHUNK_ROWS, values.dtype)
    chunk[: min(len(values), LOGITS_CHUNK_ROWS)] = values[:LOGITS_CHUNK_ROWS]
    return chunk


def _abstract(arrays: list[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in arrays]
