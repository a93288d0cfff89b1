"""The caches of a model's layers, paged or a state: their sizes, and the arrays themselves."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.execution.cache_memory import cache_memory, check_is_free
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.execution.state_cache import num_state_slots, slot_bytes, state_structs
from jaxis.errors import EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.kernels.paged_cache import PagedCache, make_cache_array
from jaxis.layers.kv_cache_spec import CacheSpec, KVCacheSpec
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.parallel.mesh import DATA_AXIS, MODEL_AXIS, logical_sharding

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule

# Tokens of context per sequence of `max_num_seqs` that the CPU default has blocks for.
CPU_TOKENS_PER_SEQ = 512
# A window's pool is at most this many times what `max_num_seqs` sequences hold at once; the excess keeps the windows of
# ended sequences, for prefix caching.
WINDOW_POOL_FACTOR = 2


CacheStruct = PagedCache | tuple[jax.ShapeDtypeStruct, ...]
"""A layer's cache before it is made: a `PagedCache` of a struct, or the structs of a state."""


def device_block_bytes(spec: CacheSpec, block_size: int, dtype: DTypeLike, mesh: Mesh | AbstractMesh) -> int:
    """Returns the bytes of one block of a layer's cache on each device.

    A cache that devices do not share is whole on each. The mesh's devices need not exist, but the cache's layout
    depends on their platform. `spec` is the layer's on the devices of the mesh; `dtype` is the cache's type.
    """
    with jax.sharding.use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
        layout = spec.layout(block_size, dtype)
    own = logical_sharding(mesh, layout.axes, layout.shape).shard_shape(layout.shape)
    return math.prod(own) * layout.dtype.itemsize


def block_bytes(
    specs: Sequence[CacheSpec], block_size: int, dtype: DTypeLike, mesh: Mesh | AbstractMesh
) -> dict[AttentionSpan, int]:
    """Returns the bytes of one block over all layers of each span; the span that keeps most comes first.

    Layers of one span share a pool of blocks. The bytes are those of all devices of a data rank together. `specs` has
    one spec per layer, on the devices of the mesh; `dtype` is the type of the caches.
    """
    spans = {spec.span: 0 for spec in specs}
    for spec in specs:
        spans[spec.span] += mesh.shape[MODEL_AXIS] * device_block_bytes(spec, block_size, dtype, mesh)
    return widest_first(spans)


def widest_first(bytes_per_block: Mapping[AttentionSpan, int]) -> dict[AttentionSpan, int]:
    """Returns the same mapping, with the span that keeps most first."""
    return dict(
        sorted(bytes_per_block.items(), key=lambda item: -math.inf if item[0].reach is None else -item[0].reach)
    )


def blocks_within(
    vllm_config: VllmConfig, bytes_per_block: Mapping[AttentionSpan, int], memory: int, useful_tokens: int
) -> dict[AttentionSpan, int]:
    """Returns the number of blocks of each pool: the most that fit in `memory` and can be used.

    `bytes_per_block` has the bytes of a block in the layers of each span, the span that keeps most first. Tokens past
    `useful_tokens` would never be used in the first pool.
    """
    block_size = vllm_config.cache_config.block_size
    max_model_len = vllm_config.model_config.max_model_len
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    max_step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if not bytes_per_block:
        return {}
    first, *others = bytes_per_block
    most = {
        span: WINDOW_POOL_FACTOR * span.max_held_blocks(max_num_seqs, max_model_len, block_size, max_step_tokens)
        for span in others
    }

    def blocks_of(number: int) -> dict[AttentionSpan, int]:
        return {first: number, **{span: min(number, most[span]) for span in others}}

    def bytes_of(number: int) -> int:
        return sum(bytes_per_block[span] * blocks for span, blocks in blocks_of(number).items())

    # The largest number that fits.
    number = bisect.bisect_right(range(-(-useful_tokens // block_size) + 1), memory, key=bytes_of) - 1
    return blocks_of(number)


def holds(
    vllm_config: VllmConfig,
    units: tuple[Mapping[AttentionSpan, int], int],
    memory: int,
    *,
    num_seqs: int,
    num_tokens: int,
) -> bool:
    """Returns whether caches of `memory` bytes hold the blocks and states of `num_seqs` sequences of `num_tokens` each.

    `units` is the result of `unit_bytes`. The configured limits of sequences and of their tokens are ignored.
    """
    per_block, per_slot = units
    config = dataclasses.replace(
        vllm_config,
        model_config=dataclasses.replace(vllm_config.model_config, max_model_len=num_tokens),
        scheduler_config=dataclasses.replace(vllm_config.scheduler_config, max_num_seqs=num_seqs),
    )
    block_size, step = config.cache_config.block_size, config.scheduler_config.max_num_batched_tokens
    try:
        num_slots = num_state_slots(config, per_slot, memory, attends=bool(per_block))
    except EngineError:
        return False
    if per_slot and num_slots < num_seqs:
        return False
    blocks = blocks_within(config, per_block, memory - num_slots * per_slot, num_seqs * num_tokens)
    return all(
        span.max_held_blocks(num_seqs, num_tokens, block_size, step) <= number for span, number in blocks.items()
    )


def longest_context(
    vllm_config: VllmConfig, units: tuple[Mapping[AttentionSpan, int], int], memory: int, most: int
) -> int:
    """Returns the tokens of the longest single sequence, at most `most`, that the caches hold; 0 for none."""
    return _largest(lambda tokens: holds(vllm_config, units, memory, num_seqs=1, num_tokens=tokens), most)


def most_sequences(
    vllm_config: VllmConfig, units: tuple[Mapping[AttentionSpan, int], int], memory: int, num_tokens: int
) -> int:
    """Returns the number of sequences of so many tokens that the caches hold at once."""
    per_block, per_slot = units
    most = memory // min(per_block.values(), default=per_slot)
    return _largest(lambda seqs: holds(vllm_config, units, memory, num_seqs=seqs, num_tokens=num_tokens), most)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to `most` that holds; 0 for none. Smaller numbers than one that holds do, too."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda number: not holds(number))


def num_cache_blocks(
    vllm_config: VllmConfig,
    bytes_per_block: Mapping[AttentionSpan, int],
    mesh: Mesh,
    *,
    state_bytes: int = 0,
    memory: int | None = None,
    share: float | None = None,
) -> tuple[dict[AttentionSpan, int], int]:
    """Computes the number of blocks to allocate.

    Every pool gets the same number, except that pools of windows (or chunks) alongside pools that keep more get only
    what they can use, and leave the rest to the others.

    Args:
      vllm_config: The engine's configuration: sizes, and the memory if it was given.
      bytes_per_block: Bytes of a block in the layers of each span, the span that keeps most first.
      mesh: The devices of the caches.
      state_bytes: Bytes of the memory that recurrent states take.
      memory: Bytes of all caches of a data rank; None means `cache_memory`, for a mesh with one data rank.
      share: Share of them that this host has; None for its share of the mesh.

    Returns:
      The number of blocks in each pool, and `max_model_len`, shortened if the cache cannot hold a sequence that long.

    Raises:
      EngineError: The memory does not suffice for one block, or is less than requested.
    """
    block_size = vllm_config.cache_config.block_size
    max_model_len = vllm_config.model_config.max_model_len
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    max_step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    memory = (cache_memory(vllm_config, mesh) if memory is None else memory) - state_bytes
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    # More blocks would never be used.
    useful_tokens = max_num_seqs * max_model_len
    if on_cpu and vllm_config.cache_config.kv_cache_memory_bytes is None:
        useful_tokens = min(useful_tokens, max(max_model_len, max_num_seqs * CPU_TOKENS_PER_SEQ))
    num_blocks = blocks_within(vllm_config, bytes_per_block, memory, useful_tokens)
    total = sum(bytes_per_block[span] * blocks for span, blocks in num_blocks.items())
    if on_cpu:
        here = len(mesh.local_devices) / mesh.shape["model"] if share is None else share
        check_is_free(int((total + state_bytes) * here))
    if total <= 0 and bytes_per_block:
        one_block = sum(bytes_per_block.values())
        raise EngineError(
            f"the KV cache needs at least {one_block / 2**20:.1f} MiB for one block of {block_size} tokens, and "
            f"{memory / 2**20:.1f} MiB are available: free memory, or give a larger kv_cache_memory"
        )
    for span, blocks in num_blocks.items():
        # A window's pool suffices for any length; otherwise it counts as one with full context.
        if span.max_held_blocks(1, max_model_len, block_size, max_step_tokens) > blocks:
            max_model_len = min(max_model_len, blocks * block_size)
    return num_blocks, max_model_len


class RepeatedHeads(NamedTuple):
    """The repetition of the heads of a cache.

    Attributes:
      axis: Axis of the heads in the cache's shape.
      num_heads: Number of heads along it.
      copies: Copies of each of the model's heads among them, one copy after the other.
    """

    axis: int
    num_heads: int
    copies: int


@dataclass(frozen=True)
class CachePlan:
    """The KV caches of a model on a mesh, before they are made.

    Attributes:
      structs: Shapes and shardings, one for each layer that caches.
      layer_groups: Group of each cache: the index of its span in `num_blocks`; for a state, the number after those.
      bytes_per_block: Bytes of a block over all layers of a span, the span that keeps most first.
      num_blocks: Blocks of each layer of a span; each data rank has as many.
      num_state_slots: Slots of the recurrent states of a data rank; None if no layer has any.
      bytes_per_slot: Bytes of a slot over all layers.
      max_model_len: The configured one, shortened if the caches cannot hold a sequence that long.
      repeated_heads: Repetition of each layer's heads if more devices share it than it has heads; otherwise None.
    """

    structs: list[CacheStruct]
    layer_groups: list[int]
    bytes_per_block: dict[AttentionSpan, int]
    num_blocks: dict[AttentionSpan, int]
    num_state_slots: int | None
    bytes_per_slot: int
    max_model_len: int
    repeated_heads: list[RepeatedHeads | None]


def plan_kv_caches(
    model: JaxModule,
    vllm_config: VllmConfig,
    mesh: Mesh,
    memory: int | None = None,
    num_blocks: int | None = None,
) -> CachePlan:
    """Sizes the caches of a model. Its weights and devices need not exist if the memory is configured.

    Args:
      model: The model.
      vllm_config: The engine's configuration.
      mesh: The devices of the caches.
      memory: Bytes of all caches on all hosts; None means `cache_memory`, that of this host.
      num_blocks: Blocks of every pool; None for as many as fit in `memory`. With equal pools, a scheduler that ignores
        spans can give each sequence one block table, whose ids every layer has.

    Raises:
      ConfigError: The model's heads cannot be spread over the mesh.
      EngineError: The memory does not suffice; see `num_cache_blocks`.
    """
    return plan_caches(cache_specs(model, vllm_config), vllm_config, mesh, memory, num_blocks=num_blocks)


def plan_caches(
    specs: Sequence[CacheSpec | StateCacheSpec],
    vllm_config: VllmConfig,
    mesh: Mesh,
    memory: int | None,
    share: float | None = None,
    num_blocks: int | None = None,
) -> CachePlan:
    """Does `plan_kv_caches` for layers with these specs, whose caches this host has a `share` of."""
    cache_config, activations = vllm_config.cache_config, vllm_config.model_config.dtype
    dtype = cache_config.cache_dtype or activations
    specs = on_devices(specs, mesh)
    per_block, per_slot = unit_bytes(specs, vllm_config, mesh)
    of_rank = (cache_memory(vllm_config, mesh) if memory is None else memory) // mesh.shape[DATA_AXIS]
    num_slots = num_state_slots(vllm_config, per_slot, of_rank, attends=bool(per_block))
    state_bytes = per_slot * num_slots
    if num_blocks is None:
        of_span, max_model_len = num_cache_blocks(
            vllm_config, per_block, mesh, state_bytes=state_bytes, memory=of_rank, share=share
        )
    else:
        of_span = dict.fromkeys(per_block, num_blocks)
        max_model_len = min(vllm_config.model_config.max_model_len, num_blocks * cache_config.block_size)
    structs: list[CacheStruct] = []
    layer_groups, spans = [], list(of_span)
    for spec in specs:
        layer_groups.append(len(spans) if isinstance(spec, StateCacheSpec) else spans.index(spec.span))
        if isinstance(spec, StateCacheSpec):
            structs.append(state_structs(spec, num_slots, activations, mesh))
        else:
            structs.append(_kv_cache_struct(spec, of_span[spec.span], cache_config.block_size, dtype, mesh))
    repeated = [_repeated_heads(spec, struct) for spec, struct in zip(specs, structs, strict=True)]
    return CachePlan(structs, layer_groups, per_block, of_span, num_slots or None, per_slot, max_model_len, repeated)


def _repeated_heads(spec: CacheSpec | StateCacheSpec, struct: CacheStruct) -> RepeatedHeads | None:
    if not isinstance(spec, KVCacheSpec) or isinstance(struct, tuple) or spec.copies == 1:
        return None
    assert struct.layout.head_axis is not None
    return RepeatedHeads(struct.layout.head_axis, spec.num_kv_heads, spec.copies)


def on_devices(
    specs: Sequence[CacheSpec | StateCacheSpec], mesh: Mesh | AbstractMesh
) -> list[CacheSpec | StateCacheSpec]:
    """Returns the specs of the same layers, spread over the devices of a mesh."""
    size = mesh.shape["model"]
    return [spec if isinstance(spec, StateCacheSpec) else spec.on_devices(size) for spec in specs]


def unit_bytes(
    specs: Sequence[CacheSpec | StateCacheSpec], vllm_config: VllmConfig, mesh: Mesh | AbstractMesh
) -> tuple[dict[AttentionSpan, int], int]:
    """Returns the bytes of one block in all layers of each span, and of one slot in all layers with a state.

    The bytes are those of all devices of a data rank together. `specs` are those of the layers on these devices.
    """
    dtype = vllm_config.cache_config.cache_dtype or vllm_config.model_config.dtype
    paged = [spec for spec in specs if not isinstance(spec, StateCacheSpec)]
    per_block = block_bytes(paged, vllm_config.cache_config.block_size, dtype, mesh)
    states = [spec for spec in specs if isinstance(spec, StateCacheSpec)]
    return per_block, slot_bytes(states, vllm_config.model_config.dtype, mesh)


def stage_share(
    of_stage: tuple[Mapping[AttentionSpan, float], float], of_all: tuple[Mapping[AttentionSpan, int], int]
) -> float:
    """Returns the largest share of all stages' caches that a pipeline stage has, however memory is divided.

    Both arguments are results of `unit_bytes`: for the stage's layers, and for all layers.
    """
    (per_block, per_slot), (all_per_block, all_per_slot) = of_stage, of_all
    shares = [num_bytes / all_per_block[span] for span, num_bytes in per_block.items()]
    return max([*shares, per_slot / all_per_slot if all_per_slot else 0.0])


def _kv_cache_struct(spec: CacheSpec, num_blocks: int, block_size: int, dtype: DTypeLike, mesh: Mesh) -> PagedCache:
    """Spreads the heads over the mesh, and gives each data rank blocks of its own."""
    with jax.set_mesh(mesh):
        layout = spec.layout(block_size, dtype)
    shape = (mesh.shape[DATA_AXIS] * num_blocks, *layout.shape)
    sharding = logical_sharding(mesh, ("blocks", *layout.axes), shape)
    return layout.cache(jax.ShapeDtypeStruct(shape, layout.dtype, sharding=sharding))


def make_kv_caches(structs: Sequence[CacheStruct]) -> list[Any]:
    """Makes the caches in the form of their `structs`.

    Raises:
      EngineError: A device does not have enough memory.
    """

    def make(cache: CacheStruct) -> Any:
        # A new sequence's state is zeros, whatever is in its slot.
        only_written = isinstance(cache, tuple) or cache.layout.kernels == "native"
        return jax.tree.map(functools.partial(make_cache_array, reads_only_written=only_written), cache)

    try:
        return [make(cache) for cache in structs]
    except jax.errors.JaxRuntimeError as error:
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(list(structs)))
        raise EngineError(
            f"the device has no memory for a KV cache of {human_bytes(size)}: give a smaller kv_cache_memory"
        ) from error
