"""One device's part of a model: the arrays that it holds, and its costs of a step."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.bench.cost import EMBEDDING, EXPERTS, HEAD, DecodeCost, decode_cost_of, expert_share
from jaxis.compilation.accelerators import Accelerator
from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.execution.kv_cache import device_block_bytes, widest_first
from jaxis.engine.execution.state_cache import slot_bytes
from jaxis.engine.memory_account import MemoryPlace, Width
from jaxis.errors import ConfigError
from jaxis.layers.experts import JaxExperts
from jaxis.layers.indexer import IndexCacheSpec
from jaxis.layers.kv_cache_spec import CacheSpec, KVCacheSpec
from jaxis.layers.mla import LatentCacheSpec
from jaxis.layers.mlp import GatedMLP, UngatedMLP
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.moe import SparseMoE
from jaxis.layers.selected_attention import SelectedKVCacheSpec
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.layers.token_groups import RowCacheSpec
from jaxis.layers.weight_bytes import StoredWeight
from jaxis.models.common.decoder import DecoderModel
from jaxis.models.common.looped import runs_of_weights
from jaxis.parallel.equal_shares import check_heads
from jaxis.parallel.mesh import DATA_AXIS, MODEL_AXIS
from jaxis.parallel.stages import WHOLE, Stage
from jaxis.planning.exchanges import STAGE_AXIS, Exchange
from jaxis.planning.layout import Layout
from jaxis.planning.roofline import StepCost

_FEED_FORWARDS = (GatedMLP, UngatedMLP, SparseMoE, JaxExperts)
_LAYER = re.compile(r".*?layers\.\d+(?=\.)")
_LOGIT_BYTES = 4
_SUM_BYTES = 4  # of an element of what a device's part of the context adds to the output


@dataclass(frozen=True)
class LayerCache:
    """A layer's context on one device.

    Attributes:
      flops_per_key: Operations for one query token and one token of its context, in all heads of the device.
      num_layers: Layers that attend to it: its own, and layers without a cache of their own that share it.
      num_selected: Most visible tokens that a query token reads; None is all.
    """

    span: AttentionSpan
    block_bytes: int
    flops_per_key: int
    num_layers: int
    num_selected: int | None = None


@dataclass(frozen=True)
class DeviceModel:
    """One device's part of a model; all devices, or all of a pipeline stage, have equal parts.

    Attributes:
      layer_flops: Operations of products for one token of the device's own data rank, without experts.
      expert_flops: Operations of the experts on the device, of which a token is routed to some.
      head_flops: Operations of the head for one token that is sampled from.
      state_bytes: Bytes of a request's recurrent states in all layers.
      num_layers: Layers, each of which sums its attention's or its state's output over the devices.
      num_feed_forwards: Layers that do the same with a feed-forward block's output.
      num_divided_contexts: Layers whose context the devices share.
      query_bytes, sum_bytes: Bytes of one token's queries of all heads there, and of the sums for them.
      splits_vocab: True if each device has a part of the embeddings, and computes a part of the logits.
    """

    layout: Layout
    stage: Stage
    held_bytes: int
    reads: DecodeCost
    layer_flops: float
    expert_flops: float
    head_flops: float
    caches: tuple[LayerCache, ...]
    state_bytes: int
    block_size: int
    hidden_bytes: int
    logits_bytes: int
    num_layers: int
    num_feed_forwards: int
    num_expert_layers: int
    num_divided_contexts: int
    query_bytes: int
    sum_bytes: int
    splits_vocab: bool

    @property
    def bytes_per_block(self) -> dict[AttentionSpan, int]:
        """Bytes of a block in all layers of a span, the span that keeps most first."""
        total: Counter[AttentionSpan] = Counter()
        for cache in self.caches:
            total[cache.span] += cache.block_bytes
        return widest_first(total)

    def place(self, extra_bytes: int = 0) -> MemoryPlace:
        """Returns the device's memory, with so many bytes of extra memory beside the weights."""
        return MemoryPlace(self.held_bytes + extra_bytes, (self.bytes_per_block, self.state_bytes))

    def decode(self, batch_size: int, context_len: int) -> StepCost:
        """Computes a step of one token for each of `batch_size` requests, which then have `context_len` tokens each.

        The cost is for a device of the data rank that has most of them.
        """
        own = -(-batch_size // self.layout.data_parallel_size)
        return self._step(own, batch_size, np.full(own, context_len - 1), own)

    def prefill(self, num_tokens: int) -> StepCost:
        """Returns the cost of a step that computes `num_tokens` tokens of a prompt on each data rank, and samples."""
        return self._step(num_tokens, num_tokens * self.layout.data_parallel_size, np.arange(num_tokens), 1)

    def _step(self, num_tokens: int, num_all_tokens: int, positions: np.ndarray, num_sampled: int) -> StepCost:
        """Computes a step; `positions` and `num_sampled` are for the device's own data rank."""
        num_expert_tokens = num_all_tokens if self.layout.enable_expert_parallel else num_tokens
        context_bytes, flops = self.context(positions, is_one_request=num_sampled == 1)
        # States are read and written whole.
        context_bytes += 2.0 * self.state_bytes * num_sampled
        flops += self.layer_flops * num_tokens + self.expert_flops * num_expert_tokens + self.head_flops * num_sampled
        weight_bytes = self.reads.step_weight_bytes(num_expert_tokens)
        return StepCost(weight_bytes, context_bytes, flops, tuple(self._exchanges(num_tokens, num_sampled)))

    def context(self, positions: np.ndarray, *, is_one_request: bool) -> tuple[float, float]:
        """Returns the bytes of caches that tokens at these positions read, and the operations of their attention."""
        context_bytes = flops = 0.0
        for cache, num_caches in Counter(self.caches).items():
            num_layers = num_caches * cache.num_layers
            first = cache.span.first_visible(positions)
            num_keys = positions - first + 1
            if cache.num_selected is not None:
                num_keys = np.minimum(num_keys, cache.num_selected)
            # The tokens of one request share its context; each is written once, too.
            num_read = positions.max() - first.min() + 1 if is_one_request else num_keys.sum()
            num_read = min(num_read, num_keys.sum())
            context_bytes += num_layers * float(num_read) * cache.block_bytes / self.block_size
            flops += num_layers * float(num_keys.sum()) * cache.flops_per_key
        return context_bytes, flops

    def _exchanges(self, num_tokens: int, num_sampled: int) -> Iterator[Exchange]:
        """Yields the exchanges of a step with so many tokens, and so many sampled ones, on each data rank."""
        model, data = self.layout.tensor_parallel_size, self.layout.data_parallel_size
        hidden = num_tokens * self.hidden_bytes
        num_spread = self.num_expert_layers if self.layout.enable_expert_parallel else 0
        if model > 1:
            if self.splits_vocab and self.stage.is_first:
                yield Exchange("embeddings", "all-reduce", (MODEL_AXIS,), model, hidden, 1)
            if self.num_divided_contexts:
                # Each attends with the queries of all heads to its part, and gets the sums of its own heads.
                number = self.num_divided_contexts
                yield Exchange("queries", "all-gather", (MODEL_AXIS,), model, num_tokens * self.query_bytes, number)
                sums = num_tokens * self.sum_bytes
                yield Exchange("context", "reduce-scatter", (MODEL_AXIS,), model, sums, number)
            yield Exchange("attention", "all-reduce", (MODEL_AXIS,), model, hidden, self.num_layers)
            if self.num_feed_forwards > num_spread:
                number = self.num_feed_forwards - num_spread
                yield Exchange("feed-forward", "all-reduce", (MODEL_AXIS,), model, hidden, number)
        if data > 1 and num_spread:
            # Every device gets all ranks' tokens, and sums what its experts make of them.
            yield Exchange("tokens to experts", "all-gather", (DATA_AXIS,), data, data * hidden, num_spread)
            yield Exchange("experts' outputs", "reduce-scatter", (DATA_AXIS,), data, data * hidden, num_spread)
        if model > 1 and num_spread:
            yield Exchange("experts' outputs", "all-reduce", (MODEL_AXIS,), model, hidden, num_spread)
        if self.splits_vocab and self.stage.is_last:
            yield Exchange("logits", "all-gather", (MODEL_AXIS,), model, num_sampled * self.logits_bytes, 1)
        if self.stage.num_stages > 1:
            # The first only sends, the last only receives, and others do both at once.
            yield Exchange("hidden states", "collective-permute", (STAGE_AXIS,), 2, hidden, 1)


def device_model(
    width: Width, accelerator: Accelerator, layout: Layout, cache_dtype: DTypeLike, stage: Stage = WHOLE
) -> DeviceModel:
    """Computes one device's part of a model; shapes of caches depend on the accelerator's kernels.

    Raises ConfigError if the model, or its context, cannot be spread over so many devices.
    """
    vllm_config, specs = width.vllm_config, width.cache_specs(stage)
    layers_per_cache = _layers_per_cache(width.model(stage), len(specs))
    weights = width.weights_on(layout.mesh(), stage, spreads_experts=layout.enable_expert_parallel)
    block_size = vllm_config.cache_config.block_size
    if layout.decode_context_parallel_size > 1:
        specs = _with_divided_context(specs, layout.decode_context_parallel_size, block_size)
    config = vllm_config.model_config.hf_config.get_text_config()
    num_devices = layout.tensor_parallel_size  # that share a layer of one request
    paged = [
        (spec.on_devices(num_devices), number)
        for spec, number in zip(specs, layers_per_cache, strict=True)
        if not isinstance(spec, StateCacheSpec)
    ]
    states = [spec for spec in specs if isinstance(spec, StateCacheSpec)]
    num_heads: int = config["num_attention_heads"] if paged else 0
    if paged:
        check_heads(num_heads, num_heads, num_devices)
    mesh = layout.mesh(accelerator)
    share = expert_share(config)
    # An indexer's keys are a cache beside that of its layer, which is counted.
    num_layers = sum(
        number
        for spec, number in zip(specs, layers_per_cache, strict=True)
        if not isinstance(spec, IndexCacheSpec | RowCacheSpec)
    )
    runs = runs_of_weights(width.model(stage))
    used = [_times(weight, runs.get(weight.name, 1)) for weight in weights]
    experts = [weight for weight in used if EXPERTS in weight.name]
    others = [weight for weight in used if EXPERTS not in weight.name]
    divided = [
        (spec, number) for spec, number in paged if isinstance(spec, LatentCacheSpec) and spec.context_devices > 1
    ]
    element_bytes = jnp.dtype(vllm_config.model_config.dtype).itemsize
    vocab_size: int = config["vocab_size"]
    # An embedding table that is not the head too, of this stage, is not read whole.
    read = [weight for weight in used if stage.is_last or EMBEDDING not in weight.name]
    return DeviceModel(
        layout=layout,
        stage=stage,
        held_bytes=sum(weight.device_bytes for weight in weights),
        reads=decode_cost_of({weight.name: weight.device_bytes for weight in read}, 0, share),
        layer_flops=_flops(others, of_head=False),
        expert_flops=share * _flops(experts, of_head=False),
        head_flops=_flops(others, of_head=True) if stage.is_last else 0.0,
        caches=tuple(
            LayerCache(
                spec.span,
                device_block_bytes(spec, block_size, cache_dtype, mesh),
                _flops_per_key(spec, num_heads // num_devices),
                number,
                spec.num_selected if isinstance(spec, LatentCacheSpec | SelectedKVCacheSpec) else None,
            )
            for spec, number in paged
        ),
        state_bytes=slot_bytes(states, vllm_config.model_config.dtype, mesh) // mesh.size,
        block_size=block_size,
        hidden_bytes=config["hidden_size"] * element_bytes,
        logits_bytes=vocab_size * _LOGIT_BYTES,
        num_layers=num_layers,
        num_feed_forwards=_num_feed_forwards(width.model(stage)),
        num_expert_layers=len({weight.name.partition(EXPERTS)[0] for weight in experts}),
        num_divided_contexts=sum(number for _, number in divided),
        query_bytes=max((num_heads * (s.latent_dim + s.rope_dim) * element_bytes for s, _ in divided), default=0),
        # Beside each head's latent, what its scores sum up to.
        sum_bytes=max((num_heads * (s.latent_dim + 1) * _SUM_BYTES for s, _ in divided), default=0),
        splits_vocab=num_devices > 1 and vocab_size % num_devices == 0,
    )


def _layers_per_cache(model: JaxModule, num_caches: int) -> list[int]:
    """Counts the runs of layers that use each cache."""
    decoder = next((module for _, module in named_modules(model) if isinstance(module, DecoderModel)), None)
    if decoder is None:
        return [1] * num_caches
    uses = decoder.cache_uses()
    return [uses[entry] for entry in range(num_caches)]


@functools.lru_cache(maxsize=8)
def _num_feed_forwards(model: JaxModule) -> int:
    """Counts the layers with a feed-forward block: a dense one, experts, or both."""
    blocks = [name for name, module in named_modules(model) if isinstance(module, _FEED_FORWARDS)]
    return len({match[0] if (match := _LAYER.match(name)) else name for name in blocks})


def _with_divided_context(
    specs: Sequence[CacheSpec | StateCacheSpec], num_devices: int, block_size: int
) -> list[CacheSpec | StateCacheSpec]:
    """Divides the tokens of latent caches among devices. Raises ConfigError if the engine would refuse it."""
    option = f"--decode-context-parallel-size {num_devices}"
    latents = [spec for spec in specs if isinstance(spec, LatentCacheSpec)]
    if not latents:
        raise ConfigError(f"{option} is for caches of latents, which this model does not have: leave it out")
    if any(spec.num_selected is not None for spec in latents):
        raise ConfigError(
            f"{option}: the model attends to selected tokens, whose context cannot be divided: leave it out"
        )
    if block_size % num_devices:
        raise ConfigError(f"{option} does not divide blocks of {block_size} tokens: give a divisor of {block_size}")
    return [
        dataclasses.replace(spec, context_devices=num_devices) if isinstance(spec, LatentCacheSpec) else spec
        for spec in specs
    ]


def _times(weight: StoredWeight, runs: int) -> StoredWeight:
    """Returns a weight as large as what several runs of its layer read of it."""
    return StoredWeight(weight.name, runs * weight.device_bytes, runs * weight.device_elements)


def _flops(weights: Sequence[StoredWeight], *, of_head: bool) -> float:
    """Counts operations of one token with the head's weights, or with all others but an embedding table."""
    has_head = any(HEAD in weight.name for weight in weights)
    flops = 0.0
    for weight in weights:
        is_embedding, is_head = EMBEDDING in weight.name, HEAD in weight.name
        if (is_head or (is_embedding and not has_head)) == of_head and not (is_embedding and has_head):
            flops += 2 * weight.device_elements
    return flops


def _flops_per_key(spec: CacheSpec, num_heads: int) -> int:
    """Counts operations for one query, of `num_heads` on this device, with one token's key and value."""
    if isinstance(spec, LatentCacheSpec):
        return 2 * num_heads * (2 * spec.latent_dim + spec.rope_dim)
    if isinstance(spec, KVCacheSpec):
        return 2 * num_heads * 2 * spec.head_dim
    if isinstance(spec, IndexCacheSpec):
        return 2 * spec.num_heads * spec.head_dim // spec.group_size  # of an indexer, every device has all heads
    return 0  # a layer of another kind, whose arithmetic is not known
