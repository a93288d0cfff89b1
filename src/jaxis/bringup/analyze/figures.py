"""Computes a model's size: parameters, bytes, KV cache per token, and what fits into memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.bringup.analyze.config import Construction, construct
from jaxis.bringup.analyze.source import ModelSource
from jaxis.config import VllmConfig
from jaxis.config.expert_counts import experts_per_token
from jaxis.engine.execution.cache_memory import usable_bytes
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.execution.kv_cache import on_devices, unit_bytes
from jaxis.engine.memory_account import LOW_PRECISION, MemoryAccount, MemoryPlace
from jaxis.layers.indexer import IndexCacheSpec
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.mla import LatentCacheSpec
from jaxis.layers.module import JaxModule, named_parameters
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.layers.weight_bytes import logical_axes, weight_bytes
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.common.interfaces import has_tied_head
from jaxis.parallel.mesh import EXPERT_AXES, make_mesh
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import DEQUANTIZE, SHORT_NAMES

BLOCK_SIZE = 16


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; shared ones count once.

    Attributes:
      embedding: Parameters of the token embedding table, which is looked up, not multiplied, unless it is tied to the
        head.
      active: Parameters that multiply one token: all except unchosen experts and tables that are only looked up (untied
        embeddings, per-layer embeddings).
    """

    total: int
    embedding: int
    experts: int
    active: int


@dataclass(frozen=True)
class CacheKind:
    """Layers with the same kind of cache.

    Attributes:
      kind: "full", "window", "chunk", "latent", "index" (an indexer's keys, beside the latents of its layer) or
        "state"; a window or chunk is as long as `max_tokens`.
      bytes_per_token: Bytes per token of all these layers together; of a state, its bytes, which are for all tokens.
      max_tokens: Most tokens of a sequence that are needed at once; None is all.
    """

    kind: str
    layers: int
    bytes_per_token: int
    max_tokens: int | None


@dataclass(frozen=True)
class Fit:
    """Weights of one precision in a memory, and the context that fits beside them.

    They fit if there is room for one block of cache. The context is the longest single sequence, at most the model's
    limit.
    """

    weights: str
    weight_bytes: int
    fits: bool
    context_tokens: int


def count_parameters(model: JaxModule, config: Mapping[str, Any]) -> ParameterCount:
    """Counts the parameters of an abstractly constructed model."""
    sizes = {id(param): (name, param) for name, param in named_parameters(model)}.values()
    total = embedding = experts = of_layers = 0
    for name, param in sizes:
        size = _num_elements(param)
        total += size
        if next(iter(logical_axes(param)), None) in EXPERT_AXES:
            experts += size
        elif name.endswith("embed_tokens.weight"):
            embedding += size
        elif name.endswith("embed_tokens_per_layer.weight"):
            of_layers += size
    chosen, available = experts_per_token(config), _num_experts(model)
    used = experts * chosen // available if available and chosen else experts
    looked_up = of_layers if has_tied_head(model) else of_layers + embedding
    return ParameterCount(total, embedding, experts, total - experts + used - looked_up)


def bytes_by_dtype(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Sums the bytes of a checkpoint's tensors per type, largest first."""
    found: Counter[str] = Counter()
    for info in tensors.values():
        found[str(info.dtype)] += info.nbytes
    return dict(found.most_common())


def cache_kinds(model: JaxModule, vllm_config: VllmConfig, dtype: DTypeLike) -> list[CacheKind]:
    """Groups the model's layers by the cache that they keep of each token, in the type `dtype`."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for spec in cache_specs(model, vllm_config):
        if isinstance(spec, StateCacheSpec):
            token_bytes = spec.slot_bytes(vllm_config.model_config.dtype)
        else:
            token_bytes = spec.layout(BLOCK_SIZE, dtype).block_bytes // BLOCK_SIZE
        kinds.setdefault(cache_span(spec), []).append(token_bytes)
    return [CacheKind(kind, len(each), sum(each), tokens) for (kind, tokens), each in kinds.items()]


def cache_span(spec: CacheSpec | StateCacheSpec) -> tuple[str, int | None]:
    """Returns the kind of a layer's cache, as `CacheKind` names it, and the most tokens it needs at once."""
    if isinstance(spec, StateCacheSpec):
        return "state", 1
    if isinstance(spec, IndexCacheSpec):
        return "index", None
    if spec.span.sliding_window is not None:
        return "window", spec.span.sliding_window
    if spec.span.attention_chunk_size is not None:
        return "chunk", spec.span.attention_chunk_size
    return "latent" if isinstance(spec, LatentCacheSpec) else "full", None


def fits_in(source: ModelSource, model: JaxModule, vllm_config: VllmConfig, memory_bytes: int) -> Iterator[Fit]:
    """Yields the fit of weights as published, in floats, and in each lower precision that their sizes allow.

    `model` is without quantization. The longest context is the configured `max_model_len`.
    """
    sizes = {np.dtype(vllm_config.model_config.dtype).name: weight_bytes(model)}
    if source.tensors is not None:
        sizes = {"as published": sum(info.nbytes for info in source.tensors.values()), **sizes}
    for quantization in LOW_PRECISION:
        if (quantized := constructed_in(source, quantization).model) is not None:
            sizes[quantization] = weight_bytes(quantized)
    mesh, most = make_mesh(), vllm_config.model_config.max_model_len
    units = unit_bytes(on_devices(cache_specs(model, vllm_config), mesh), vllm_config, mesh)
    for name, size in sizes.items():
        context = MemoryAccount(vllm_config, [MemoryPlace(size, units)]).longest_context(usable_bytes(memory_bytes))
        yield Fit(name, size, context >= min(BLOCK_SIZE, most), context)


def constructed_in(source: ModelSource, quantization: str) -> Construction:
    """Constructs a model without its checkpoint's quantization, in another one or with DEQUANTIZE in none."""
    rules = None
    if quantization != DEQUANTIZE:
        rules = RuleQuantizationConfig(SHORT_NAMES[quantization], must_match=False)
    return construct({**source.config, "quantization_config": None}, source.config_path, rules)


def _num_elements(param: nnx.Param) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param.get_value()))


def _num_experts(model: JaxModule) -> int | None:
    for _, param in named_parameters(model):
        if next(iter(logical_axes(param)), None) in EXPERT_AXES:
            return jax.tree.leaves(param.get_value())[0].shape[0]
    return None
