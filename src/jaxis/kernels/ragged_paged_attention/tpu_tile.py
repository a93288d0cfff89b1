"""A tile of queries in the kernel of paged attention: an online softmax over its context (arXiv:2205.14135)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.ragged_paged_attention.tpu_append import PageAppender
from jaxis.kernels.ragged_paged_attention.tpu_layout import LANES, PageLayout
from jaxis.kernels.ragged_paged_attention.tpu_pages import NEXT_USE, Item, PageStream

MASKED = -2e30
# A lower bound of scores. Masked tokens have a weight of exp(-1e30) = 0 even before the first visible score.
LOWEST_PEAK = -1e30
# The most rows of a tile that are computed at a time. With FEW_ROWS or less, several heads are computed side by side,
# because one head's products then hide the others' latencies.
MAX_ROWS_TOGETHER = 128
FEW_ROWS = 64
HEADS_TOGETHER = 8


@dataclass(frozen=True)
class Scoring:
    scale: float
    span: AttentionSpan
    soft_cap: float | None


@dataclass(frozen=True)
class Tile:
    """A tile of queries, its output, and its sums over the context so far.

    Attributes:
      q: [1, K, M, key planes * 128].
      sinks: float32 [K, M, 128], equal in all lanes, or None.
      out: [1, K, M, value planes * 128].
      peak: float32 [K, M, 128], the largest score, equal in all lanes.
      total: float32 [K, M, 128], whose sum over all lanes is the sum of weights relative to the peak.
      values: float32 [K, M, value planes * 128], the sum of weighted values.
      appender: Writer of the new entries of decodes, or None.
    """

    q: Any
    sinks: Any
    out: Any
    peak: Any
    total: Any
    values: Any
    stream: PageStream
    appender: PageAppender | None
    page: PageLayout
    scoring: Scoring
    tile_queries: int
    group_size: int

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_rows(self) -> int:
        return self.q.shape[2]

    def attend(self, index: Any) -> None:
        """Fills the output's rows of item `index` of this tile."""
        item = self.stream.items[index]
        first_row = self.stream.items.tiles[index] * self.tile_queries
        if self.sinks is None:
            self.peak[...] = jnp.full(self.peak.shape, LOWEST_PEAK, jnp.float32)
            self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        else:
            self.peak[...] = self.sinks[...]
            self.total[...] = jnp.full(self.total.shape, 1 / LANES, jnp.float32)
        self.values[...] = jnp.zeros(self.values.shape, jnp.float32)

        def one_chunk(chunk: Any, buffer: Any) -> Any:
            self.stream.advance()
            self.stream.wait(item, chunk, buffer)
            if (appender := self.appender) is not None:

                @pl.when(chunk + 1 == self.stream.chunks(item)[1])
                def _() -> None:
                    appender.append(index, item, self.stream, chunk, buffer)

            self._clear_unseen(item, chunk, buffer)

            def add(rows: Any, row: Any) -> None:
                self._add_chunk(rows, row + item.to_position, chunk, buffer)

            self._for_rows(first_row, add)
            return self.stream.following(buffer)

        cursor = self.stream.cursor
        cursor[NEXT_USE] = jax.lax.fori_loop(*self.stream.chunks(item), one_chunk, cursor[NEXT_USE])
        self._for_rows(first_row, lambda rows, row: self._write_output(rows, (row >= item.begin) & (row < item.end)))

    def _for_rows(self, first_row: Any, do: Callable[[Any, Any], None]) -> None:
        """Calls `do(rows, row)` for as many of the tile's rows at a time as registers hold.

        `do` takes a slice of them, and their tokens' rows of the flat batch, i32 [len(rows), 1], from `first_row` on.
        """
        of_register = 32 // self.q.dtype.itemsize
        sizes = range(of_register, MAX_ROWS_TOGETHER + 1, of_register)
        size = max(n for n in sizes if self.num_rows % n == 0)

        def one_group(group: Any, _: None) -> None:
            start = pl.multiple_of(group * size, size)
            row = (jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) + start) // self.group_size
            do(pl.ds(start, size), row + first_row)

        jax.lax.fori_loop(0, self.num_rows // size, one_group, None)

    def _clear_unseen(self, item: Item, chunk: Any, buffer: Any) -> None:
        """Sets values to zero at tokens outside of the item, where a page or the buffer may hold NaN."""
        if self.page.is_scaled:
            return
        stream, size = self.stream, self.page.block_size
        first, _ = stream.pages(item, chunk)

        def clear(place: Any, _: None) -> None:
            index = chunk * stream.chunk_pages + place
            seen = jnp.where(index < first, 0, jnp.clip(item.newest + 1 - index * size, 0, size))

            @pl.when(seen < size)
            def _() -> None:
                is_seen = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0) < seen

                def clear_head(head: Any, _: None) -> None:
                    for plane in self.page.value_planes:
                        where = (buffer, place, head, self.page.rows_of(plane), slice(None))
                        rows = jnp.where(is_seen, stream.buffer[where].astype(jnp.float32), 0.0)
                        stream.buffer[where] = rows.astype(stream.buffer.dtype)

                jax.lax.fori_loop(0, self.num_heads, clear_head, None)

        is_whole = (first == chunk * stream.chunk_pages) & ((chunk + 1) * stream.chunk_tokens <= item.newest + 1)

        @pl.when(jnp.logical_not(is_whole))
        def _() -> None:
            jax.lax.fori_loop(0, stream.chunk_pages, clear, None)

    def _add_chunk(self, rows: Any, position: Any, chunk: Any, buffer: Any) -> None:
        tokens = self.stream.chunk_tokens
        context = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) + chunk * tokens
        visible = (context >= self.scoring.span.first_visible(position)) & (context <= position)

        def heads(group: Any, _: None) -> None:
            for i in range(together):
                self._add_head(group * together + i, rows, visible, buffer)

        together = 1
        if self.num_rows <= FEW_ROWS:
            together = max(n for n in range(1, HEADS_TOGETHER + 1) if self.num_heads % n == 0)
        jax.lax.fori_loop(0, self.num_heads // together, heads, None)

    def _add_head(self, head: Any, rows: Any, visible: Any, buffer: Any) -> None:
        scales = self._scales(head, buffer) if self.page.is_scaled else None
        scores = self._scores(head, rows, buffer, scales)
        if self.scoring.soft_cap is not None:
            scores = self.scoring.soft_cap * jnp.tanh(scores * (1 / self.scoring.soft_cap))
        scores = jnp.where(visible, scores, MASKED)
        old_peak = self.peak[head, rows, :]
        peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - peak[:, :1])
        shrink = jnp.exp(old_peak - peak)
        self.peak[head, rows, :] = peak
        # Lane by lane: sums across lanes are slow, and one at the end is enough.
        of_lanes = sum(weights[:, i : i + LANES] for i in range(0, weights.shape[1], LANES))
        self.total[head, rows, :] = self.total[head, rows, :] * shrink + of_lanes
        if scales is not None:
            # A token that no query sees has a weight of zero, and perhaps a scale of NaN.
            weights = jnp.where(visible, weights * scales[self.page.value_part], 0.0)
        weights = weights.astype(self.q.dtype)
        for i, plane in enumerate(self.page.value_planes):
            lanes = slice(i * LANES, (i + 1) * LANES)
            added = _dot(weights, self._plane(head, plane, buffer), contract=0)
            self.values[head, rows, lanes] = self.values[head, rows, lanes] * shrink + added

    def _scores(self, head: Any, rows: Any, buffer: Any, scales: Any) -> Any:
        of_parts = []
        for part in sorted(set(self.page.key_scales)):
            planes = [plane for plane, plane_part in enumerate(self.page.key_scales) if plane_part == part]
            of_part = functools.reduce(operator.add, (self._product(head, rows, plane, buffer) for plane in planes))
            of_parts.append(of_part if scales is None else of_part * scales[part])
        return functools.reduce(operator.add, of_parts) * self.scoring.scale

    def _product(self, head: Any, rows: Any, plane: int, buffer: Any) -> Any:
        queries = self.q[0, head, rows, plane * LANES : (plane + 1) * LANES]
        return _dot(queries, self._plane(head, plane, buffer), contract=1)

    def _plane(self, head: Any, plane: int, buffer: Any) -> Any:
        rows = self.stream.buffer[buffer, :, head, self.page.rows_of(plane), :].astype(self.q.dtype)
        return rows.reshape(self.stream.chunk_tokens, LANES)

    def _scales(self, head: Any, buffer: Any) -> list[Any]:
        """Returns the scales of both parts of the chunk's entries, each float32 [1, S]."""
        pages = LANES // self.page.block_size
        page_of_lane = jax.lax.broadcasted_iota(jnp.int32, (2, LANES), 1) // self.page.block_size
        groups = []
        for first in range(0, self.stream.chunk_pages, pages):
            scales = jnp.zeros((2, LANES), jnp.float32)
            for i in range(pages):
                of_page = self.stream.buffer[buffer, first + i, head, self.page.scale_rows, :]
                scales = jnp.where(page_of_lane == i, pltpu.bitcast(of_page, jnp.float32), scales)
            groups.append(scales)
        scales = jnp.concatenate(groups, axis=1)
        return [scales[:1], scales[1:]]

    def _write_output(self, rows: Any, is_own: Any) -> None:
        def write(head: Any, _: None) -> None:
            total = jnp.sum(self.total[head, rows, :], axis=1, keepdims=True)
            new = self.values[head, rows, :] / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
            old = self.out[0, head, rows, :].astype(jnp.float32)
            self.out[0, head, rows, :] = jnp.where(is_own, new, old).astype(self.out.dtype)

        jax.lax.fori_loop(0, self.num_heads, write, None)


def _dot(a: Any, b: Any, *, contract: int) -> Any:
    """Multiplies a [M, X] with b over b's axis `contract`, in float32."""
    # A TPU would otherwise multiply only the upper half of float32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
