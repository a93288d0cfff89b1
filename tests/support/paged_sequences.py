"""Runs sequences through a model's paged path, one explicit step at a time: the tests' own minimal engine.

It shares next to nothing with `jaxis.engine`: blocks are handed out in a scattered order, steps are padded to fixed
sizes, and what runs together is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.engine.execution.state_cache import state_structs
from jaxis.kernels.paged_cache import PagedCache, to_stored
from jaxis.kernels.state_slots import StateSlots
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import HasCache, KVCacheSpec
from jaxis.layers.module import named_modules
from jaxis.layers.state_cache_spec import HasState, StateCacheSpec
from jaxis.parallel.mesh import logical_sharding, make_mesh


@dataclass
class PagedSequence:
    """A sequence's blocks, and how many of its tokens are in the cache; the slot that its recurrent states are in, its
    own slot, and those that keep its states after some of its lengths."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    read_slot: int = -1
    slot: int = -1
    kept: dict[int, int] = field(default_factory=dict)


class PagedSequences:
    """KV caches, and the sequences in them.

    Args:
      model: A decoder of `jaxis.models`.
      block_size, num_blocks, max_blocks: B, blocks in all (none is ever freed), and most blocks of a sequence.
      dtype: Type of the caches.
      mesh: Mesh of the model; None is one device.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        block_size: int = 8,
        num_blocks: int = 256,
        max_blocks: int = 25,
        dtype: Any = jnp.float32,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        self.mesh = mesh or make_mesh()
        graph, self.state = nnx.split(model)
        self.block_size, self.max_blocks = block_size, max_blocks
        # Scattered, and none is block 0, which padding rows of a block table name.
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, num_blocks)))
        # NaN, so that reading a slot that was not written shows.
        self.caches = []
        for _, module in named_modules(model):
            if isinstance(module, HasCache):
                self.caches.append(self._empty_cache(module.kv_cache_spec, num_blocks, dtype))
            elif isinstance(module, HasState):
                self.caches.append(self._empty_state(module.state_cache_spec, num_blocks, dtype))
        self.has_states = any(isinstance(module, HasState) for _, module in named_modules(model))
        self.free_slots = list(np.random.default_rng(1).permutation(num_blocks))

        def forward(state, caches, input_ids, metadata):
            merged = nnx.merge(graph, state)
            caches, hidden, _ = merged(caches, input_ids, metadata)
            return caches, merged.compute_logits(hidden)

        self._forward = jax.jit(forward, donate_argnums=1)

    def _empty_cache(self, spec: KVCacheSpec, num_blocks: int, dtype: Any) -> PagedCache:
        with jax.set_mesh(self.mesh):
            layout = spec.on_devices(self.mesh.shape["model"]).layout(self.block_size, dtype)
        shape = (num_blocks, *layout.shape)
        sharding = logical_sharding(self.mesh, (None, *layout.axes), shape)
        return layout.cache(jax.device_put(to_stored(jnp.full(shape, jnp.nan), layout.dtype), sharding))

    def _empty_state(self, spec: StateCacheSpec, num_slots: int, dtype: Any) -> tuple[jax.Array, ...]:
        structs = state_structs(spec, num_slots, dtype, self.mesh)
        return tuple(jnp.full(struct.shape, jnp.nan, struct.dtype, device=struct.sharding) for struct in structs)

    def states(self, sequence: PagedSequence) -> list[list[np.ndarray]]:
        """States in the sequence's slot, of each layer that has one, in the order of the layers."""
        return [
            [np.asarray(array[sequence.slot]) for array in cache] for cache in self.caches if isinstance(cache, tuple)
        ]

    def fork(self, parent: PagedSequence, length: int) -> PagedSequence:
        """A sequence that shares the parent's blocks for its first `length` tokens, a multiple of the block size."""
        assert length % self.block_size == 0
        assert length <= parent.length
        read_slot = parent.kept[length] if self.has_states and length else -1
        return PagedSequence(parent.blocks[: length // self.block_size], length, read_slot)

    def step(
        self, work: Sequence[tuple[PagedSequence, Sequence[int]]], *, pad_tokens: int, pad_requests: int
    ) -> list[np.ndarray]:
        """Runs each sequence's next tokens in one flat batch; returns each one's logits [tokens, V].

        Sequences with one token go first, as the contract asks of decodes.
        """
        order = sorted(range(len(work)), key=lambda i: len(work[i][1]) > 1)
        input_ids = np.zeros(pad_tokens, np.int32)
        positions = np.zeros(pad_tokens, np.int32)
        block_tables = np.zeros((pad_requests, self.max_blocks), np.int32)
        seq_lens = np.zeros(pad_requests, np.int32)
        starts = np.zeros(pad_requests + 1, np.int32)
        slots = np.full((4, pad_requests), -1, np.int32)
        for row, i in enumerate(order):
            sequence, tokens = work[i]
            if self.has_states:
                slots[:, row] = self._state_step(sequence, len(tokens))
            begin, end = starts[row], starts[row] + len(tokens)
            input_ids[begin:end] = tokens
            positions[begin:end] = sequence.length + np.arange(len(tokens))
            sequence.length += len(tokens)
            while len(sequence.blocks) * self.block_size < sequence.length:
                sequence.blocks.append(self.free.pop())
            block_tables[row, : len(sequence.blocks)] = sequence.blocks
            seq_lens[row] = sequence.length
            starts[row + 1 :] = end
        num_decodes = sum(len(tokens) == 1 for _, tokens in work)
        metadata = AttentionMetadata(
            jnp.asarray(positions),
            jnp.asarray(block_tables),
            jnp.asarray(seq_lens),
            jnp.asarray(starts),
            jnp.asarray([num_decodes, num_decodes, len(work)], jnp.int32),
            state_slots=StateSlots(*map(jnp.asarray, slots)) if self.has_states else None,
        )
        with jax.set_mesh(self.mesh):
            self.caches, logits = self._forward(self.state, self.caches, jnp.asarray(input_ids), metadata)
        rows = np.asarray(logits)
        results: list[Any] = [None] * len(work)
        for row, i in enumerate(order):
            results[i] = rows[starts[row] : starts[row + 1]]
        return results

    def _state_step(self, sequence: PagedSequence, num_tokens: int) -> tuple[int, int, int, int]:
        """Slots that the step reads, writes and keeps states in; they are kept after the last full block."""
        if sequence.slot < 0:
            sequence.slot = self.free_slots.pop()
        read, sequence.read_slot = sequence.read_slot, sequence.slot
        boundary = (sequence.length + num_tokens) // self.block_size * self.block_size
        if boundary <= sequence.length:
            return read, sequence.slot, -1, 0
        sequence.kept[boundary] = self.free_slots.pop()
        return read, sequence.slot, sequence.kept[boundary], boundary - sequence.length
