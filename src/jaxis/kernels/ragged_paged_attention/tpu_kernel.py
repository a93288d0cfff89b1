"""Kernel of paged attention on TPU: tiles of queries attend to the chunks of their requests' contexts.

Decodes run it with tiles of one query, prefills with tiles of many. For a kv head, a tile's rows are its tokens with
all their query heads, [M, D]. A request's tokens in the tile attend to the request's context with an online softmax
(arXiv:2205.14135) with sums in float32; other rows keep their values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxis.kernels.hbm import in_hbm
from jaxis.kernels.ragged_paged_attention.tpu_append import NewEntries, PageAppender
from jaxis.kernels.ragged_paged_attention.tpu_layout import LANES, PageLayout
from jaxis.kernels.ragged_paged_attention.tpu_pages import Items, PageStream
from jaxis.kernels.ragged_paged_attention.tpu_tile import Scoring, Tile

VMEM_LIMIT_BYTES = 48 << 20


@dataclass(frozen=True)
class Tiling:
    """Sizes of a kernel, which follow from the model and its cache.

    Attributes:
      tile_queries: Tokens of a tile.
      chunk_pages: Pages of context that are computed with at a time.
      num_buffers: Chunks in VMEM or in flight.
    """

    tile_queries: int
    chunk_pages: int
    num_buffers: int


def attend_tiles(
    q: jax.Array,
    kv_cache: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    items: tuple[jax.Array, jax.Array, jax.Array],
    sinks: jax.Array | None,
    entries: NewEntries | None,
    *,
    page: PageLayout,
    tiling: Tiling,
    scoring: Scoring,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Attends with tiles of queries. Tiles without an item, and rows outside of all items, contain garbage.

    Args:
      q: [tiles, K, M, key planes * 128]; row m has the tile's token m // G and the kv head's query head m % G.
      kv_cache: [num_blocks, K, N, 128].
      seq_lens: i32 [R].
      block_tables: i32 [R, max_blocks].
      query_start_loc: i32 [R + 1].
      items: Their number, i32 []; the request and the tile of each, i32 [max_items], tiles in order.
      sinks: float32 [K, M, 1], or None.
      entries: Entries of decodes, one in each item's tile, that are not in the cache yet. None if the cache has all.
      page: Layout of a page.
      tiling: Sizes.
      scoring: Computation of scores.
      group_size: G, query heads of a kv head.

    Returns:
      The cache with the entries, and [tiles, K, M, value planes * 128].
    """
    _, num_heads, num_rows, _ = q.shape
    value_width = len(page.value_planes) * LANES
    count, requests, tiles = items
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % LANES)))[:, None]
    out_shape = jax.ShapeDtypeStruct((*q.shape[:3], value_width), q.dtype)
    scalars = {
        "count": count[None],
        "requests": requests,
        "tiles": tiles,
        "seq_lens": seq_lens,
        "query_start_loc": query_start_loc,
    }
    operands = {"q": (q, _of_tile(q))}
    outputs = {"out": (out_shape, _of_tile(out_shape))}
    scratch = PageStream.scratch_shapes(kv_cache, tiling.num_buffers, tiling.chunk_pages, tables.shape[-1])
    for name, width in (("peak", LANES), ("total", LANES), ("values", value_width)):
        scratch[name] = pltpu.VMEM((num_heads, num_rows, width), jnp.float32)
    if sinks is not None:
        shape = (num_heads, num_rows, LANES)
        operands["sinks"] = (jnp.broadcast_to(sinks, shape), pl.BlockSpec(shape, lambda *_: (0, 0, 0)))
    # The cache stays where it is: pl.ANY would let XLA move a small one to VMEM, whole.
    in_place = pl.BlockSpec(memory_space=pltpu.HBM)
    if entries is not None:
        scalars["blocks"] = entries.blocks
        operands["new_planes"] = (entries.planes, _of_tile(entries.planes))
        if entries.scales is not None:
            operands["new_scales"] = (entries.scales, _of_tile(entries.scales))
        outputs["new_cache"] = (jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype), in_place)
        scratch |= PageAppender.scratch_shapes(kv_cache)
    operands |= {"tables": (tables, in_place), "cache": (in_hbm(kv_cache), in_place)}
    out, *new_cache = pl.pallas_call(
        functools.partial(
            _kernel,
            names=(*scalars, *operands, *outputs, *scratch),
            page=page,
            tile_queries=tiling.tile_queries,
            scoring=scoring,
            group_size=group_size,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            # An empty grid is no grid; an item that is none does nothing.
            grid=(jnp.maximum(count, 1),),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases={} if entries is None else {len(scalars) + len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        name="attend_to_pages" if entries is None else "append_and_attend_to_pages",
    )(*scalars.values(), *[operand for operand, _ in operands.values()])
    return (new_cache[0] if new_cache else kv_cache), out


def _of_tile(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Returns the specification of blocks [1, ...] of an array [tiles, ...]: the tile of each item."""

    def index(item: Any, *scalars: Any) -> tuple[Any, ...]:
        tiles = scalars[2]
        return (tiles[item], *[0] * (len(x.shape) - 1))

    return pl.BlockSpec((1, *x.shape[1:]), index)


def _kernel(
    *refs: Any, names: tuple[str, ...], page: PageLayout, tile_queries: int, scoring: Scoring, group_size: int
) -> None:
    ref = dict(zip(names, refs, strict=True))
    count, index = ref["count"][0], pl.program_id(0)
    items = Items(
        count=count,
        requests=ref["requests"],
        tiles=ref["tiles"],
        seq_lens=ref["seq_lens"],
        query_start_loc=ref["query_start_loc"],
        tile_queries=tile_queries,
        span=scoring.span,
    )
    stream = PageStream(
        items=items,
        tables=ref["tables"],
        cache=ref["cache"],
        table_buffer=ref["table_buffer"],
        buffer=ref["buffer"],
        table_arrived=ref["table_arrived"],
        page_arrived=ref["page_arrived"],
        cursor=ref["cursor"],
        block_size=page.block_size,
    )
    appender = None
    if "new_cache" in ref:
        appender = PageAppender(
            blocks=ref["blocks"],
            planes=ref["new_planes"],
            scales=ref.get("new_scales"),
            cache=ref["new_cache"],
            stages=ref["stages"],
            written=ref["written"],
            page=page,
        )
    tile = Tile(
        q=ref["q"],
        sinks=ref.get("sinks"),
        out=ref["out"],
        peak=ref["peak"],
        total=ref["total"],
        values=ref["values"],
        stream=stream,
        appender=appender,
        page=page,
        scoring=scoring,
        tile_queries=tile_queries,
        group_size=group_size,
    )

    @pl.when(index < count)
    def _() -> None:
        @pl.when(index == 0)
        def _() -> None:
            stream.begin()

        tile.attend(index)
        if appender is not None:

            @pl.when(index == count - 1)
            def _(appender: PageAppender = appender) -> None:
                appender.finish(count)
