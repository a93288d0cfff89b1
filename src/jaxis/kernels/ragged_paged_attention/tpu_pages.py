"""Copies of a kernel's pages from HBM, several chunks ahead of their use and across requests.

An item is some consecutive queries of one request. Its context is read in chunks of whole pages at multiples of the
chunk's size, so that the sums of a request are split the same way in every batch. Only pages that the item's queries
see are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxis.config.attention_span import AttentionSpan

# Elements of the cursor: the next chunk to copy (its item, its index, its buffer), and the buffer to use next.
ITEM, CHUNK, BUFFER, NEXT_USE = range(4)


class Item(NamedTuple):
    """Scalars of an item, in a kernel.

    Attributes:
      begin, end: First row of the flat batch, and one past the last.
      to_position: Difference between a token's position and its row.
      oldest: First position that any of the queries sees.
      newest: Position of the last query.
    """

    request: Any
    begin: Any
    end: Any
    to_position: Any
    oldest: Any
    newest: Any


@dataclass(frozen=True)
class Items:
    """Items of a kernel call: requests by tiles of `tile_queries` rows of the flat batch."""

    count: Any
    requests: Any
    tiles: Any
    seq_lens: Any
    query_start_loc: Any
    tile_queries: int
    span: AttentionSpan

    def __getitem__(self, index: Any) -> Item:
        request, tile = self.requests[index], self.tiles[index]
        begin = jnp.maximum(tile * self.tile_queries, self.query_start_loc[request])
        end = jnp.minimum((tile + 1) * self.tile_queries, self.query_start_loc[request + 1])
        to_position = self.seq_lens[request] - self.query_start_loc[request + 1]
        oldest = self.span.first_visible(to_position + begin)
        return Item(request, begin, end, to_position, oldest, to_position + end - 1)


@dataclass(frozen=True)
class PageStream:
    """Stream of the chunks of all items, in order, through a ring of buffers.

    Attributes:
      tables: i32 [R, 1, max_blocks] in HBM.
      cache: [num_blocks, K, N, 128] in HBM.
      table_buffer: i32 [2, 1, max_blocks] in SMEM: tables of the item whose pages are being copied, and of the next.
      buffer: [num_buffers, chunk_pages, K, N, 128] in VMEM.
      table_arrived, page_arrived: Semaphores [2] and [num_buffers].
      cursor: i32 [4] in SMEM.
    """

    items: Items
    tables: Any
    cache: Any
    table_buffer: Any
    buffer: Any
    table_arrived: Any
    page_arrived: Any
    cursor: Any
    block_size: int

    @staticmethod
    def scratch_shapes(kv_cache: jax.Array, num_buffers: int, chunk_pages: int, table_width: int) -> dict[str, Any]:
        """Returns the scratch memory that the kernel needs for a stream, by attribute."""
        return {
            "table_buffer": pltpu.SMEM((2, 1, table_width), jnp.int32),
            "buffer": pltpu.VMEM((num_buffers, chunk_pages, *kv_cache.shape[1:]), kv_cache.dtype),
            "table_arrived": pltpu.SemaphoreType.DMA((2,)),
            "page_arrived": pltpu.SemaphoreType.DMA((num_buffers,)),
            "cursor": pltpu.SMEM((4,), jnp.int32),
        }

    @property
    def num_buffers(self) -> int:
        return self.buffer.shape[0]

    @property
    def chunk_pages(self) -> int:
        return self.buffer.shape[1]

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_pages * self.block_size

    def chunks(self, item: Item) -> tuple[Any, Any]:
        return item.oldest // self.chunk_tokens, item.newest // self.chunk_tokens + 1

    def pages(self, item: Item, chunk: Any) -> tuple[Any, Any]:
        """Returns the first page of a chunk that an item reads, and one past the last, as indices in its table."""
        first = jnp.maximum(item.oldest // self.block_size, chunk * self.chunk_pages)
        return first, jnp.minimum(item.newest // self.block_size + 1, (chunk + 1) * self.chunk_pages)

    def begin(self) -> None:
        """Starts the copies of the first chunks but leaves one buffer free. There must be an item."""
        for name in range(4):
            self.cursor[name] = 0
        self._table_copy(0).start()
        self._enter(0)

        def advance(_: Any, __: None) -> None:
            self.advance()

        jax.lax.fori_loop(0, self.num_buffers - 1, advance, None)

    def advance(self) -> None:
        """Starts the copy of the next chunk, if there is one, into the buffer after the one in use."""
        index = self.cursor[ITEM]

        @pl.when(index < self.items.count)
        def _() -> None:
            item, chunk, buffer = self.items[index], self.cursor[CHUNK], self.cursor[BUFFER]

            def start(page: Any, _: None) -> None:
                block = self.table_buffer[index % 2, 0, page]
                self._page_copy(block, buffer, page - chunk * self.chunk_pages).start()

            jax.lax.fori_loop(*self.pages(item, chunk), start, None)
            self.cursor[BUFFER] = self.following(buffer)
            is_last = chunk + 1 == self.chunks(item)[1]

            @pl.when(jnp.logical_not(is_last))
            def _() -> None:
                self.cursor[CHUNK] = chunk + 1

            @pl.when(is_last)
            def _() -> None:
                self.cursor[ITEM] = index + 1
                self._enter(index + 1)

    def wait(self, item: Item, chunk: Any, buffer: Any) -> None:
        def wait_for(page: Any, _: None) -> None:
            # Any block will do: a wait only looks at where the copy goes, and how large it is.
            self._page_copy(0, buffer, page - chunk * self.chunk_pages).wait()

        jax.lax.fori_loop(*self.pages(item, chunk), wait_for, None)

    def following(self, buffer: Any) -> Any:
        return jnp.where(buffer + 1 == self.num_buffers, 0, buffer + 1)

    def _enter(self, index: Any) -> None:
        """Goes on to an item, if there is one: waits for its table and starts the copy of the next one's."""

        @pl.when(index < self.items.count)
        def _() -> None:
            self._table_copy(index).wait()
            self.cursor[CHUNK] = self.chunks(self.items[index])[0]

            @pl.when(index + 1 < self.items.count)
            def _() -> None:
                self._table_copy(index + 1).start()

    def _table_copy(self, index: Any) -> Any:
        place = index % 2
        return pltpu.make_async_copy(
            self.tables.at[self.items.requests[index]], self.table_buffer.at[place], self.table_arrived.at[place]
        )

    def _page_copy(self, block: Any, buffer: Any, place: Any) -> Any:
        return pltpu.make_async_copy(self.cache.at[block], self.buffer.at[buffer, place], self.page_arrived.at[buffer])
