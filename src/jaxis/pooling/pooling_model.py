"""A model on its devices that computes vectors or logits of many texts at a time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.config import VllmConfig
from jaxis.engine.execution.model_arrays import ModelArrays, hidden_state_struct
from jaxis.engine.execution.programs import CompileWait
from jaxis.kernels.paged_cache import PagedCache, make_cache_array
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.models.common.decoder import DecoderModel
from jaxis.parallel.mesh import logical_sharding
from jaxis.pooling.interfaces import HasScore, HasSentenceLayers, TakesTokenTypes
from jaxis.pooling.pooler import lengths_up_to_others, normalized, pool
from jaxis.pooling.pooling_config import PoolingSettings

SMALLEST_STEP_TOKENS = 16


@dataclass(frozen=True)
class _StepShape:
    """Padded size of a step: T tokens of R texts."""

    num_tokens: int
    num_texts: int


class PoolingModel:
    """Computes vectors or logits. On CPU, the result of an input does not depend, by a bit, on the other inputs.

    Texts are computed whole, as many in a step as fit, without a prefix cache.

    Args:
      vllm_config: The configuration; `max_num_batched_tokens` limits the tokens of a step, and so of an input.
      model: The loaded model.
      decoder: Decoder of the model.
      specs: Cache spec of each layer on the devices.
      mesh: Mesh that the model was loaded to.
      settings: Pooling settings.

    Attributes:
      max_step_tokens: Limit of a step's tokens.
      max_step_texts: Limit of a step's texts.
      compile_wait: The last wait for a program to compile, which may take minutes. Other threads may read it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: Any,
        decoder: DecoderModel,
        specs: Sequence[CacheSpec],
        mesh: jax.sharding.Mesh,
        settings: PoolingSettings,
    ) -> None:
        self._config, self._mesh, self._settings = vllm_config, mesh, settings
        self.max_step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_step_texts = vllm_config.scheduler_config.max_num_seqs
        self._block_size = vllm_config.cache_config.block_size
        # No step reads another step's keys and values, so equal layers share one cache.
        self._specs = list(dict.fromkeys(specs))
        decoder.cache_entries = tuple((self._specs.index(spec),) for spec in specs)
        with jax.set_mesh(mesh):
            self._arrays = ModelArrays(model, hidden_state_struct(vllm_config, mesh), has_head=False)
            self._caches = [self._make_cache(spec) for spec in self._specs]
        self._programs: dict[_StepShape, Callable[..., Any]] = {}
        self.compile_wait: CompileWait | None = None

    @property
    def model(self) -> Any:
        return self._arrays.model

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on all devices together."""
        return self._arrays.num_bytes

    def embed(self, texts: Sequence[Sequence[int]], second_starts: Sequence[int] | None = None) -> np.ndarray:
        """Computes the vector or logits of each text.

        Args:
          texts: Token ids; each text has at least one, and at most `max_step_tokens`.
          second_starts: Start of the second text of a pair; the number of tokens if the text is not a pair.

        Returns:
          float32 [number of texts, E], or [number of texts, labels].
        """
        vectors: list[np.ndarray | None] = [None] * len(texts)
        dispatched: list[tuple[list[int], jax.Array]] = []
        for indices in self._steps(texts):
            starts = None if second_starts is None else [second_starts[index] for index in indices]
            dispatched.append((indices, self.begin([texts[index] for index in indices], starts)))
            # A step runs while the next one is prepared.
            if len(dispatched) > 1:
                _take(*dispatched.pop(0), vectors)
        for step in dispatched:
            _take(*step, vectors)
        return np.stack([vector for vector in vectors if vector is not None])

    def close(self) -> None:
        """Frees the weights and caches."""
        self._arrays.release()
        self._caches, self._programs = [], {}

    def _steps(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields the indices of each step's texts. Texts of similar length are together, the longest first."""
        step: list[int] = []
        num_tokens = 0
        for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
            size = len(texts[index])
            if step and (num_tokens + size > self.max_step_tokens or len(step) == self.max_step_texts):
                yield step
                step, num_tokens = [], 0
            step.append(index)
            num_tokens += size
        if step:
            yield step

    def begin(self, texts: Sequence[Sequence[int]], second_starts: Sequence[int] | None = None) -> jax.Array:
        """Starts a step.

        Args:
          texts: Token ids; as many texts as fit into a step.
          second_starts: Start of the second text of each pair, as in `embed`.

        Returns:
          Vectors or logits [R, ...]; the first rows are those of the texts.
        """
        shape = self._shape(sum(map(len, texts)), len(texts))
        input_ids = np.zeros(shape.num_tokens, np.int32)
        lengths, firsts = (np.zeros(shape.num_texts, np.int32) for _ in range(2))
        lengths[: len(texts)] = [len(text) for text in texts]
        firsts[: len(texts)] = lengths[: len(texts)] if second_starts is None else second_starts
        input_ids[: lengths.sum()] = np.concatenate([np.asarray(text, np.int32) for text in texts])
        if shape not in self._programs:
            self._add_program(shape)
        self._caches, vectors = self._programs[shape](self._arrays.arrays, self._caches, input_ids, lengths, firsts)
        return vectors

    def precompile(self) -> None:
        """Compiles programs for one short text and for full steps, so that a server's first clients do not wait."""
        for num_tokens, num_texts in (
            (SMALLEST_STEP_TOKENS, 1),
            (2 * SMALLEST_STEP_TOKENS, 1),
            (self.max_step_tokens, 2),
        ):
            shape = self._shape(min(num_tokens, self.max_step_tokens), num_texts)
            if shape not in self._programs:
                self._add_program(shape)

    def _add_program(self, shape: _StepShape) -> None:
        self.compile_wait = wait = CompileWait(time.monotonic())
        try:
            self._programs[shape] = self._compile(shape)
        finally:
            self.compile_wait = wait._replace(ended=time.monotonic())

    def _shape(self, num_tokens: int, num_texts: int) -> _StepShape:
        padded = max(SMALLEST_STEP_TOKENS, 1 << (num_tokens - 1).bit_length())
        # Three quarters of the size, where that is enough.
        padded = padded * 3 // 4 if num_tokens <= padded * 3 // 4 else padded
        tokens = max(min(padded, self.max_step_tokens), num_tokens)
        return _StepShape(tokens, 1 if num_texts == 1 else min(tokens, self.max_step_texts))

    def _compile(self, shape: _StepShape) -> Callable[..., Any]:
        with jax.set_mesh(self._mesh):
            run = jax.jit(functools.partial(self._step, shape), donate_argnums=1)
            ints = (
                jax.ShapeDtypeStruct((size,), jnp.int32)
                for size in (shape.num_tokens, shape.num_texts, shape.num_texts)
            )
            return run.lower(self._arrays.arrays, self._caches, *ints).compile()

    def _step(
        self,
        shape: _StepShape,
        arrays: list[jax.Array],
        caches: list[PagedCache],
        input_ids: jax.Array,
        lengths: jax.Array,
        second_starts: jax.Array,
    ) -> tuple[list[PagedCache], jax.Array]:
        stops = jnp.cumsum(lengths)
        starts = stops - lengths
        rows = jnp.arange(shape.num_tokens, dtype=jnp.int32)
        # Padding continues the last text.
        text = jnp.minimum(jnp.searchsorted(stops, rows, side="right"), shape.num_texts - 1)
        blocks = -(-lengths // self._block_size)
        table = jnp.arange(-(-shape.num_tokens // self._block_size), dtype=jnp.int32)
        num_texts = jnp.sum(lengths > 0)
        metadata = AttentionMetadata(
            input_positions=jnp.where(rows < stops[-1], rows - starts[text], 0),
            block_tables=jnp.minimum((jnp.cumsum(blocks) - blocks)[:, None] + table, self._num_blocks - 1),
            seq_lens=lengths,
            query_start_loc=jnp.concatenate([jnp.zeros(1, jnp.int32), stops]),
            request_distribution=jnp.stack([jnp.zeros_like(num_texts), num_texts, num_texts]),
        )
        model, others = self._arrays.merge(arrays), dict[str, Any]()
        if isinstance(model, TakesTokenTypes) and model.num_token_types > 1:
            others["token_types"] = (metadata.input_positions >= second_starts[text]).astype(jnp.int32)
        caches, hidden, _ = model(caches, input_ids, metadata, **others)
        if (token_id := self._settings.passed_over) is not None:
            lengths = lengths_up_to_others(input_ids, starts, lengths, token_id)
        vectors = pool(hidden, starts, lengths, self._settings.mode)
        if isinstance(model, HasSentenceLayers):
            vectors = model.sentence_layers(vectors)
        if self._settings.normalize:
            vectors = normalized(vectors)
        return caches, model.score(vectors) if isinstance(model, HasScore) else vectors

    @property
    def _num_blocks(self) -> int:
        """Number of blocks of each cache: for the longest step, where each text begins a block."""
        return -(-self.max_step_tokens // self._block_size) + self.max_step_texts

    def _make_cache(self, spec: CacheSpec) -> PagedCache:
        layout = spec.layout(self._block_size, self._config.model_config.dtype)
        shape = (self._num_blocks, *layout.shape)
        sharding = logical_sharding(self._mesh, (None, *layout.axes), shape)
        struct = jax.ShapeDtypeStruct(shape, layout.dtype, sharding=sharding)
        return layout.cache(make_cache_array(struct, reads_only_written=layout.kernels == "native"))


def _take(indices: list[int], step: jax.Array, vectors: list[np.ndarray | None]) -> None:
    """Puts the vectors of a step into the places of its texts."""
    for index, vector in zip(indices, np.asarray(step), strict=False):
        vectors[index] = vector
