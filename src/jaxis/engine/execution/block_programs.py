"""The programs that copy blocks out of the caches, and into them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.engine.execution.compiler_options import compiler_options
from jaxis.engine.execution.kv_cache import CacheStruct
from jaxis.engine.execution.rank_programs import RankPrograms
from jaxis.kernels.platform import target_platform

BLOCKS_PER_CALL = (64, 16, 4, 1)
"""How many blocks a call copies: few numbers, so that few programs are compiled."""


@dataclass(frozen=True)
class SaveKey:
    """Program: n blocks of a group of layers.

    (caches of the group, block ids i32 [n]) -> for each array of the caches, [n, ...]. Each data rank copies n blocks
    of its own; all ranks' lie one after the other.
    """

    group: int
    num_blocks: int


@dataclass(frozen=True)
class LoadKey:
    """Program: n blocks of a group of layers are overwritten; none for an id that no block has.

    (caches of the group, block ids i32 [n], for each array of the caches [n, ...]) -> caches. The caches are donated.
    Of several data ranks, as for a SaveKey.
    """

    group: int
    num_blocks: int


class BlockPrograms:
    """Traces and compiles these programs for the caches of a model.

    Attributes:
      ranks: The data ranks of the mesh.

    Args:
      caches: The shapes and shardings of the layers' caches.
      layer_groups: The group of each.
      mesh: Their devices.
    """

    def __init__(self, caches: Sequence[CacheStruct], layer_groups: Sequence[int], mesh: jax.sharding.Mesh) -> None:
        self._caches = list(caches)
        self._mesh = mesh
        self.ranks = RankPrograms(mesh)
        self._layers: dict[int, list[int]] = {}
        for layer, group in enumerate(layer_groups):
            self._layers.setdefault(group, []).append(layer)

    @property
    def groups(self) -> range:
        """The groups' numbers."""
        return range(len(self._layers))

    def layers(self, group: int) -> list[int]:
        """The indices of a group's layers among those that cache; a pipeline stage may have none of them."""
        return self._layers.get(group, [])

    def block_structs(self, group: int, num_blocks: int) -> list[Any]:
        """What a program copies, [n, ...] of each data rank for each array of the group's caches."""
        num_rows = self.ranks.num_ranks * num_blocks

        def struct(cache: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_rows, *cache.shape[1:]), cache.dtype, sharding=cache.sharding)

        return jax.tree.map(struct, [self._caches[layer] for layer in self.layers(group)])

    def compile(self, key: Hashable) -> jax.stages.Compiled:
        """The compiled program of a key. May be called from several threads."""
        assert isinstance(key, SaveKey | LoadKey)
        caches = [self._caches[layer] for layer in self.layers(key.group)]
        shardings = jax.tree.map(lambda cache: cache.sharding, caches)
        blocks = self.block_structs(key.group, key.num_blocks)
        ids = self.ranks.struct((key.num_blocks,), jnp.int32)
        operands = (caches, ids) if isinstance(key, SaveKey) else (caches, ids, blocks)
        function = self.ranks.over_ranks(_save if isinstance(key, SaveKey) else _load, operands, shardings)
        donated = () if isinstance(key, SaveKey) else 0
        with jax.set_mesh(self._mesh):
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=shardings, compiler_options=_options())
            return jitted.lower(*operands).compile()


def _save(caches: list[Any], block_ids: jax.Array) -> list[Any]:
    return jax.tree.map(lambda cache: cache[block_ids], caches)


def _load(caches: list[Any], block_ids: jax.Array, blocks: list[Any]) -> list[Any]:
    return jax.tree.map(
        lambda cache, new: cache.at[block_ids].set(new, mode="drop", unique_indices=True), caches, blocks
    )


def _options() -> dict[str, Any] | None:
    if target_platform() != "cpu":
        return compiler_options()
    # Nothing is computed. With this pass, XLA would scatter by converting the whole cache to float32 and back.
    return {"xla_disable_hlo_passes": "float-normalization-bf16"}
