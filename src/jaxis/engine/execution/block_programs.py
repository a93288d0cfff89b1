"""The programs that copy blocks out of the caches and into them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.device_state import DeviceState
from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.program_context import ProgramContext, jit, shardings_of
from jaxis.engine.execution.program_key import Compiled, RunsOn
from jaxis.kernels.platform import target_platform

BLOCKS_PER_CALL = (64, 16, 4, 1)
"""Numbers of blocks that a call may copy: few, so that few programs are compiled."""


@dataclass(frozen=True)
class _CopyKey:
    """Blocks to copy: their number, and their group of layers."""

    group: int
    num_blocks: int

    runs_on = RunsOn.EACH_STAGE
    description = "a copy of blocks"
    num_tokens = 0
    result_tree = None


class SaveKey(_CopyKey):
    """A copy of n blocks of a group of layers, as they are after the calls so far.

    (caches of the group, block ids i32 [n]) -> for each array of the caches, [n, ...]. Each data rank copies n blocks
    of its own; the ranks' blocks lie one after the other.
    """

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        caches = [context.caches[layer] for layer in context.layers_of_group(self.group)]
        operands = (caches, context.ranks.struct((self.num_blocks,), jnp.int32))
        return _lower(context, _save, operands)

    def run(self, program: Compiled, state: DeviceState, block_ids: np.ndarray) -> list[Any]:
        """Returns [D * n, ...] for each array of the group's caches; `block_ids` is int32 [D * n], n of each rank."""
        saved = program([state.caches[i] for i in state.context.layers_of_group(self.group)], block_ids)
        if not state.context.is_on_host:
            for array in jax.tree.leaves(saved):
                array.copy_to_host_async()
        return saved


class LoadKey(_CopyKey):
    """Copies into n blocks of a group of layers, for later calls to read. An id that no block has copies nothing.

    (caches of the group, block ids i32 [n], for each array of the caches [n, ...]) -> caches. The caches are donated.
    Data ranks are treated as in `SaveKey`.
    """

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        caches = [context.caches[layer] for layer in context.layers_of_group(self.group)]
        blocks = block_structs(caches, context.ranks.num_ranks * self.num_blocks)
        operands = (caches, context.ranks.struct((self.num_blocks,), jnp.int32), blocks)
        return _lower(context, _load, operands, donate_argnums=0)

    def run(self, program: Compiled, state: DeviceState, block_ids: np.ndarray, blocks: Iterator[Any]) -> None:
        """Writes blocks that `SaveKey.run` returned.

        `block_ids` is int32 [D * n], n of each data rank. `blocks` has the arrays of all pipeline stages; each stage
        takes its own from the front.
        """
        layers = state.context.layers_of_group(self.group)
        own = list(itertools.islice(blocks, len(layers)))
        for i, cache in zip(layers, program([state.caches[i] for i in layers], block_ids, own), strict=True):
            state.caches[i] = cache


def group_structs(plan: CachePlan, group: int, num_rows: int) -> list[Any]:
    """Returns the structs of `num_rows` blocks of a group of layers, as `LoadKey.run` takes them."""
    caches = [cache for cache, number in zip(plan.structs, plan.layer_groups, strict=True) if number == group]
    return block_structs(caches, num_rows)


def block_structs(caches: list[Any], num_rows: int) -> list[Any]:
    """Returns, for each array of these caches, the struct of `num_rows` of its blocks."""
    return jax.tree.map(
        lambda cache: jax.ShapeDtypeStruct((num_rows, *cache.shape[1:]), cache.dtype, sharding=cache.sharding), caches
    )


def _save(caches: list[Any], block_ids: jax.Array) -> list[Any]:
    return jax.tree.map(lambda cache: cache[block_ids], caches)


def _load(caches: list[Any], block_ids: jax.Array, blocks: list[Any]) -> list[Any]:
    return jax.tree.map(
        lambda cache, new: cache.at[block_ids].set(new, mode="drop", unique_indices=True), caches, blocks
    )


def _lower(context: ProgramContext, function: Callable[..., Any], operands: Any, **options: Any) -> jax.stages.Lowered:
    """Lowers a function whose results are shaped like its first operand, the caches."""
    shardings = shardings_of(operands[0])
    if target_platform() == "cpu":
        # Nothing is computed. With this pass, XLA would scatter by converting the whole cache to float32 and back.
        options["compiler_options"] = {"xla_disable_hlo_passes": "float-normalization-bf16"}
    return jit(context.ranks.over_ranks(function, operands, shardings), out_shardings=shardings, **options).lower(
        *operands
    )
