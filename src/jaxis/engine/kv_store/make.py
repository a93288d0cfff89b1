"""Construction of the storage of KV cache blocks: host memory, disk, other engines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.programs import Programs
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.kv_store.block_layout import BlockArray, StoredBlockLayout
from jaxis.engine.kv_store.connector import StoreConnector
from jaxis.engine.kv_store.disk_tier import DiskTier
from jaxis.engine.kv_store.store import LEASE_SECONDS, KVStore
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.host.extras import check_extra
from jaxis.host.machine import free_host_bytes

if TYPE_CHECKING:
    from jaxis.config.kv_transfer import KVTransferConfig
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.kv_store.peers import Peers

# Version of the layout of a block's bytes; files of other versions are never found.
LAYOUT_VERSION = 1


def make_connector(
    args: EngineArgs,
    programs: Programs,
    block_size: int,
    fingerprint: str,
    blocks_fingerprint: Callable[[], str],
    inner: KVConnector,
) -> KVConnector:
    """Returns a connector that stores blocks and reports to `inner`; `inner` itself if the arguments ask for no store.

    Raises:
      ConfigError: There is not enough memory, the folder or an address cannot be used, or an extra is missing.
    """
    plan, peers = programs.executor.plan, None
    store = _make_store(args, plan, block_size, fingerprint)
    if store is None:
        return inner
    if args.kv_transfer is not None:
        peers = _make_peers(args.kv_transfer, store, plan, block_size, blocks_fingerprint())
    return StoreConnector(programs, store, peers, inner)


def _make_store(args: EngineArgs, plan: CachePlan, block_size: int, fingerprint: str) -> KVStore | None:
    transfer = args.kv_transfer
    if args.kv_offloading_bytes is not None:
        size, name = args.kv_offloading_bytes, f"kv_offloading_size={args.kv_offloading_size} GiB"
    elif transfer is not None:
        size, name = int(transfer.kv_buffer_size), f"kv_transfer_config: kv_buffer_size={transfer.kv_buffer_size:g}"
    else:
        return None
    block_bytes = [sum(array.num_bytes for array in group) for group in _block_arrays(plan)]
    if sum(block_bytes) > size:
        raise ConfigError(
            f"{name} holds no block of {block_size} tokens, which takes {human_bytes(sum(block_bytes))}: give more"
        )
    if size > (free := free_host_bytes()):
        raise ConfigError(f"{name} is more than the {human_bytes(free)} of memory that are free: give less")
    disk = None
    if args.kv_offloading_dir is not None:
        namespace = _namespace(plan, block_size, fingerprint)
        disk = DiskTier(Path(args.kv_offloading_dir), namespace, args.kv_offloading_disk_bytes)
    lease_seconds = LEASE_SECONDS if transfer is None else transfer.lease_seconds
    return KVStore(size, block_bytes, disk, lease_seconds=lease_seconds)


def _make_peers(config: KVTransferConfig, store: KVStore, plan: CachePlan, block_size: int, fingerprint: str) -> Peers:
    """Returns the engine's part in prefill and decode on different machines; takes a `blocks_fingerprint`."""
    check_extra("server", "kv_transfer_config")
    from jaxis.engine.kv_store.peers import Peers

    return Peers(config, store, _namespace(plan, block_size, fingerprint), StoredBlockLayout(_block_arrays(plan)))


def _block_arrays(plan: CachePlan) -> list[list[BlockArray]]:
    groups: list[list[BlockArray]] = [[] for _ in range(max(plan.layer_groups) + 1)]
    for group, layer, repeated in zip(plan.layer_groups, plan.structs, plan.repeated_heads, strict=True):
        for leaf in jax.tree.leaves(layer):
            array = BlockArray(leaf.shape[1:], leaf.dtype.itemsize)
            if repeated is not None:
                heads = {"head_axis": repeated.axis - 1, "num_heads": repeated.num_heads, "copies": repeated.copies}
                array = array._replace(**heads)
            groups[group].append(array)
    return groups


def _namespace(plan: CachePlan, block_size: int, fingerprint: str) -> str:
    """Returns a digest of all that the bytes of a block depend on, apart from its tokens and salt."""
    # Each head counts once, since the number of devices that share the heads makes no difference.
    arrays = [[list(array.once.shape) for array in group] for group in _block_arrays(plan)]
    dtypes = [[str(leaf.dtype) for leaf in jax.tree.leaves(layer)] for layer in plan.structs]
    layers: list[Any] = [plan.layer_groups, dtypes, arrays]
    spans = [repr(span) for span in plan.num_blocks]
    facts = json.dumps([LAYOUT_VERSION, fingerprint, block_size, spans, layers])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]
