"""Writes of the keys and values of prefills into a paged cache on TPU, in place, one page at a time.

An item is a page that a request writes to. The grid's pipeline copies the page and the rows of the flat batch that may
belong into it. The kernel rotates the new rows to their place and replaces the old ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxis.kernels.hbm import in_hbm
from jaxis.kernels.ragged_paged_attention.tpu_layout import LANES, PageLayout, quantize_parts
from jaxis.kernels.ragged_paged_attention.tpu_work_items import work_items


def write_pages(
    kv_cache: jax.Array,
    parts: tuple[jax.Array, jax.Array],
    page: PageLayout,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    requests: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Returns the cache [num_blocks, K, N, 128] with the new entries of some requests, each at the end of its sequence.

    The cache is updated in place if donated. `parts` are the two parts of the entries (keys and values, or latents and
    rope keys), each [T, K, d]. `seq_lens` i32 [R] are lengths after this step, block tables i32 [R, max_blocks], and
    query_start_loc i32 [R + 1]. `requests` are the first request, and one past the last.
    """
    num_tokens, num_heads, _ = parts[0].shape
    block_size = page.block_size
    index = jnp.arange(seq_lens.shape[0])
    is_written = (index >= requests[0]) & (index < requests[1])
    num_new = jnp.where(is_written, query_start_loc[1:] - query_start_loc[:-1], 0)
    start = seq_lens - num_new
    first_page = start // block_size
    counts = jnp.where(num_new > 0, (seq_lens - 1) // block_size - first_page + 1, 0)
    # Each page has one token at least, and a request's pages but the first and the last are full.
    items = work_items(counts, min(num_tokens, num_tokens // block_size + 2 * seq_lens.shape[0]))
    request, page_index = items.request, first_page[items.request] + items.nth
    first = jnp.maximum(start[request], page_index * block_size)
    stop = jnp.minimum(seq_lens[request], (page_index + 1) * block_size)
    is_item = jnp.arange(request.shape[0]) < items.count
    scalars = (
        jnp.where(is_item, block_tables[request, jnp.clip(page_index, 0, block_tables.shape[1] - 1)], 0),
        jnp.where(is_item, query_start_loc[request] + first - start[request], 0),
        first % LANES if page.is_scaled else first % block_size,
        jnp.where(is_item, stop - first, 0),
    )
    entries = _entries(parts, page, kv_cache.dtype)
    return _write(kv_cache, entries, page, items.count, scalars, num_heads)


def _entries(parts: tuple[jax.Array, jax.Array], page: PageLayout, dtype: Any) -> list[jax.Array]:
    """Returns the sources of the kernel's rows: planes [K * P, T, 128], and int8's float32 scales [K, 2, T]."""
    scales = []
    if page.is_scaled:
        parts, of_parts = quantize_parts(parts)
        of_parts = of_parts.transpose(1, 2, 0)
        scales = [jnp.pad(of_parts, ((0, 0), (0, 0), (0, -of_parts.shape[2] % LANES)))]
    # As 32-bit integers, because registers of smaller ones cannot be rotated.
    planes = page.pad(parts).astype(jnp.int32 if page.is_scaled else dtype)
    num_tokens, num_heads, _ = planes.shape
    planes = planes.reshape(num_tokens, num_heads * page.num_planes, LANES).transpose(1, 0, 2)
    return [jnp.pad(planes, ((0, 0), (0, -num_tokens % page.block_size), (0, 0))), *scales]


def _write(
    kv_cache: jax.Array,
    entries: list[jax.Array],
    page: PageLayout,
    num_items: jax.Array,
    scalars: tuple[jax.Array, ...],
    num_heads: int,
) -> jax.Array:
    def windows(entry: jax.Array, axis: int, size: int) -> list[pl.BlockSpec]:
        """Returns blocks of tokens along `axis`: the `size` aligned ones with an item's first token, and the next."""
        shape = tuple(size if i == axis else n for i, n in enumerate(entry.shape))
        last = entry.shape[axis] // size - 1

        def index(ahead: int, item: jax.Array, *scalars: Any) -> tuple[Any, ...]:
            window = jnp.minimum(scalars[1][item] // size + ahead, last)
            return tuple(window if i == axis else 0 for i in range(entry.ndim))

        return [pl.BlockSpec(shape, functools.partial(index, ahead)) for ahead in (0, 1)]

    in_specs = windows(entries[0], 1, page.block_size)
    operands = [entries[0], entries[0]]
    if page.is_scaled:
        in_specs += windows(entries[1], 2, LANES)
        operands += [entries[1], entries[1]]
    cache_spec = pl.BlockSpec((1, *kv_cache.shape[1:]), lambda item, blocks, *_: (blocks[item], 0, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, page=page, num_heads=num_heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            # An empty grid is no grid; an item that is none rewrites block 0 as it is.
            grid=(jnp.maximum(num_items, 1),),
            in_specs=[*in_specs, cache_spec],
            out_specs=cache_spec,
        ),
        out_shape=jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
        input_output_aliases={len(scalars) + len(operands): 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="write_pages",
    )(*scalars, *operands, in_hbm(kv_cache))


def _kernel(blocks: Any, rows: Any, places: Any, counts: Any, *refs: Any, page: PageLayout, num_heads: int) -> None:
    """Writes item i: `counts[i]` tokens, from row `rows[i]` of the flat batch, to `places[i]` of block `blocks[i]`.

    `places` are positions in the page or, for a cache with scales, in 128 tokens.
    """
    del blocks
    *entries, page_in, page_out = refs
    item = pl.program_id(0)
    size = page.block_size
    row, place, count = rows[item], places[item], counts[item]
    offset = place % size
    shift = (offset - row % size + 2 * size) % (2 * size)
    index = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
    is_new = (index >= offset) & (index < offset + count)
    wide = jnp.int32 if page.is_scaled else jnp.float32

    def write_planes(head: Any) -> None:
        for plane in range(page.num_planes):
            of_plane, in_page = head * page.num_planes + plane, page.rows_of(plane)
            window = jnp.concatenate([entries[0][of_plane], entries[1][of_plane]], axis=0).astype(wide)
            new = pltpu.roll(window, shift, 0)[:size]
            old = page_in[0, head, in_page, :].astype(wide)
            page_out[0, head, in_page, :] = jnp.where(is_new, new, old).astype(page_out.dtype)

    def write_scales(head: Any) -> None:
        window = jnp.concatenate([entries[2][head], entries[3][head]], axis=1)
        new = pltpu.roll(window, (place - row % LANES + 2 * LANES) % (2 * LANES), 1)[:, :LANES]
        lane = jax.lax.broadcasted_iota(jnp.int32, (2, LANES), 1)
        old = pltpu.bitcast(page_in[0, head, page.scale_rows, :], jnp.float32)
        scales = jnp.where((lane >= place) & (lane < place + count), new, old)
        page_out[0, head, page.scale_rows, :] = pltpu.bitcast(scales, jnp.int8)

    def write_head(head: Any, _: None) -> None:
        write_planes(head)
        if page.is_scaled:
            write_scales(head)

    jax.lax.fori_loop(0, num_heads, write_head, None)
