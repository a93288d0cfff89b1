"""The size of a constructed model: parameters, cache per token, and the widths of its weights that fit into memory."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax.typing import DTypeLike

from jaxis.config.expert_counts import experts_per_token
from jaxis.engine.execution.cache_memory import usable_bytes
from jaxis.engine.execution.kv_cache import on_devices, unit_bytes
from jaxis.engine.memory_account import MemoryAccount, MemoryPlace, Width
from jaxis.layers.indexer import IndexCacheSpec
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.mla import LatentCacheSpec
from jaxis.layers.module import JaxModule, named_parameters
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.layers.weight_bytes import logical_axes
from jaxis.models.common.interfaces import has_tied_head
from jaxis.parallel.mesh import EXPERT_AXES, make_mesh


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
    """Weights of one width in a memory, and the longest single sequence that fits beside them.

    They fit if there is room for one block of cache.
    """

    weights: str
    weight_bytes: int
    fits: bool
    context_tokens: int


def count_parameters(model: JaxModule, config: Mapping[str, Any]) -> ParameterCount:
    """Counts the parameters of an abstractly constructed model, quantized or not; `config` is the text model's."""
    sizes: Counter[str] = Counter()
    for name, param in {id(param): (name, param) for name, param in named_parameters(model)}.values():
        shape, module = param.get_value().shape, name.removesuffix(".weight").rpartition(".")[2]
        is_expert = bool(axes := logical_axes(param)) and axes[0] in EXPERT_AXES
        sizes["experts" if is_expert else module] += math.prod(shape)
        if is_expert:
            sizes["unchosen"] += math.prod(shape[1:]) * (shape[0] - (experts_per_token(config) or shape[0]))
    unchosen, embedding = sizes.pop("unchosen", 0), sizes["embed_tokens"]
    looked_up = sizes["embed_tokens_per_layer"] + (0 if has_tied_head(model) else embedding)
    total = sizes.total()
    return ParameterCount(total, embedding, sizes["experts"], total - unchosen - looked_up)


def cache_kinds(width: Width, dtype: DTypeLike) -> list[CacheKind]:
    """Groups the model's layers by the cache that they keep of each token, in the type `dtype`."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    block_size = width.vllm_config.cache_config.block_size
    for spec in width.cache_specs():
        if isinstance(spec, StateCacheSpec):
            token_bytes = spec.slot_bytes(width.vllm_config.model_config.dtype)
        else:
            token_bytes = spec.layout(block_size, dtype).block_bytes // block_size
        kinds.setdefault(_span(spec), []).append(token_bytes)
    return [CacheKind(kind, len(each), sum(each), tokens) for (kind, tokens), each in kinds.items()]


def _span(spec: CacheSpec | StateCacheSpec) -> tuple[str, int | None]:
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


def fits_in(widths: Iterable[Width], cache_dtype: DTypeLike, memory_bytes: int) -> Iterator[Fit]:
    """Yields the fit of each width beside a cache of this type."""
    mesh = make_mesh()
    for width in widths:
        cache_config = dataclasses.replace(width.vllm_config.cache_config, cache_dtype=cache_dtype)
        config = dataclasses.replace(width.vllm_config, cache_config=cache_config)
        units = unit_bytes(on_devices(width.cache_specs(), mesh), config, mesh)
        place = MemoryPlace(width.weight_bytes(mesh), units)
        context = MemoryAccount(config, [place]).longest_context(usable_bytes(memory_bytes))
        fits = context >= min(cache_config.block_size, config.model_config.max_model_len)
        yield Fit(width.name, place.held_bytes, fits, context)
