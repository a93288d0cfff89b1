"""Builds the store of an engine's blocks beyond its devices."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxis.engine.execution.kv_cache import CachePlan, free_host_bytes
from jaxis.engine.kv_store.disk_tier import DiskTier
from jaxis.engine.kv_store.store import KVStore
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs

# Of a block's bytes; a file of another one is never found.
LAYOUT_VERSION = 1


def make_store(args: EngineArgs, plan: CachePlan, block_size: int, fingerprint: str) -> KVStore | None:
    """The store that the arguments ask for; None if they ask for none.

    Args:
      args: The engine's.
      plan: Its caches'.
      block_size: B.
      fingerprint: See `engine_fingerprint`.

    Raises:
      ConfigError: There is no room for it, or its folder cannot be used.
    """
    size = args.kv_offloading_bytes
    if size is None:
        return None
    block_bytes = [sum(group) for group in _cache_bytes(plan)]
    if sum(block_bytes) > size:
        raise ConfigError(
            f"kv_offloading_size={args.kv_offloading_size} GiB holds no block of {block_size} tokens, which takes "
            f"{human_bytes(sum(block_bytes))}: give more"
        )
    if size > (free := free_host_bytes()):
        raise ConfigError(
            f"kv_offloading_size={args.kv_offloading_size} GiB is more than the {human_bytes(free)} of memory that are "
            "free: give less"
        )
    disk = None
    if args.kv_offloading_dir is not None:
        namespace = _namespace(plan, block_size, fingerprint)
        disk = DiskTier(Path(args.kv_offloading_dir), namespace, args.kv_offloading_disk_bytes)
    return KVStore(size, block_bytes, disk)


def _cache_bytes(plan: CachePlan) -> list[list[int]]:
    """Of each group, the bytes of a block in each array."""
    groups: list[list[int]] = [[] for _ in range(max(plan.layer_groups) + 1)]
    for group, layer in zip(plan.layer_groups, plan.structs, strict=True):
        groups[group] += [math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layer)]
    return groups


def _namespace(plan: CachePlan, block_size: int, fingerprint: str) -> str:
    """A name for all that the bytes of a block depend on, apart from its tokens and salt."""
    layers: list[Any] = [
        [group, [[list(leaf.shape[1:]), str(leaf.dtype)] for leaf in jax.tree.leaves(layer)]]
        for group, layer in zip(plan.layer_groups, plan.structs, strict=True)
    ]
    spans = [repr(span) for span in plan.num_blocks]
    facts = json.dumps([LAYOUT_VERSION, fingerprint, block_size, spans, layers])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]
