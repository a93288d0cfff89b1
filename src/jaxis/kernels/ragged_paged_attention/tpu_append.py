"""Insertion of each decode's new entry into its page, which the attention kernel has read anyway, and writes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxis.kernels.ragged_paged_attention.tpu_layout import LANES, PageLayout, quantize_parts
from jaxis.kernels.ragged_paged_attention.tpu_pages import Item, PageStream

# Pages that are being written back while the next ones are made.
NUM_STAGES = 2


class NewEntries(NamedTuple):
    """Entries of decodes, one per row.

    Attributes:
      blocks: i32 [R], block that each entry is written to.
      planes: float32 [R, K, P, 128].
      scales: float32 [R, K, 2, 128], each scale in all lanes; None without scales.
    """

    blocks: jax.Array
    planes: jax.Array
    scales: jax.Array | None

    @classmethod
    def of(
        cls, parts: tuple[jax.Array, jax.Array], blocks: jax.Array, page: PageLayout, dtype: DTypeLike
    ) -> NewEntries:
        """Returns entries from their parts, each [R, K, d], rounded to the cache's type."""
        scales = None
        if page.is_scaled:
            parts, scales = quantize_parts(parts)
            scales = jnp.broadcast_to(scales[..., None], (*scales.shape, LANES))
        planes = page.pad(parts).astype(dtype).astype(jnp.float32)
        return cls(blocks, planes.reshape(*planes.shape[:2], page.num_planes, LANES), scales)


@dataclass(frozen=True)
class PageAppender:
    """Writer of new entries inside a kernel: the entries of the item's tile, and the pages in flight.

    Attributes:
      blocks: i32 [R] in SMEM.
      planes, scales: float32 [1, K, P, 128] and [1, K, 2, 128], or None, in VMEM.
      cache: [num_blocks, K, N, 128] in HBM.
      stages: [NUM_STAGES, K, N, 128] in VMEM.
      written: Semaphores [NUM_STAGES].
    """

    blocks: Any
    planes: Any
    scales: Any
    cache: Any
    stages: Any
    written: Any
    page: PageLayout

    @staticmethod
    def scratch_shapes(kv_cache: jax.Array) -> dict[str, Any]:
        stages = pltpu.VMEM((NUM_STAGES, *kv_cache.shape[1:]), kv_cache.dtype)
        return {"stages": stages, "written": pltpu.SemaphoreType.DMA((NUM_STAGES,))}

    def append(self, index: Any, item: Item, stream: PageStream, chunk: Any, buffer: Any) -> None:
        """Puts item `index`'s entry into the chunk that has its newest token, and starts to write the page back."""
        size, stage = self.page.block_size, index % NUM_STAGES
        place = item.newest // size - chunk * stream.chunk_pages
        is_row = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0) == item.newest % size
        is_lane = jax.lax.broadcasted_iota(jnp.int32, (2, LANES), 1) == item.newest % LANES
        wide = jnp.int32 if self.page.is_scaled else jnp.float32

        @pl.when(index >= NUM_STAGES)
        def _() -> None:
            self._copy(index - NUM_STAGES).wait()

        def put(head: Any, rows: slice, new: Any) -> None:
            stream.buffer[buffer, place, head, rows, :] = new
            self.stages[stage, head, rows, :] = new

        def append_to_head(head: Any, _: None) -> None:
            for plane in range(self.page.num_planes):
                rows = self.page.rows_of(plane)
                old = stream.buffer[buffer, place, head, rows, :].astype(wide)
                new = self.planes[0, head, plane : plane + 1, :].astype(wide)
                put(head, rows, jnp.where(is_row, new, old).astype(self.stages.dtype))
            if self.scales is not None:
                rows = self.page.scale_rows
                old = pltpu.bitcast(stream.buffer[buffer, place, head, rows, :], jnp.float32)
                put(head, rows, pltpu.bitcast(jnp.where(is_lane, self.scales[0, head], old), jnp.int8))

        jax.lax.fori_loop(0, self.planes.shape[1], append_to_head, None)
        self._copy(index).start()

    def finish(self, count: Any) -> None:
        """Waits for the last pages of `count` items; `count` is at least one."""
        for behind in range(NUM_STAGES, 0, -1):

            @pl.when(count >= behind)
            def _(behind: int = behind) -> None:
                self._copy(count - behind).wait()

    def _copy(self, index: Any) -> Any:
        stage = index % NUM_STAGES
        return pltpu.make_async_copy(self.stages.at[stage], self.cache.at[self.blocks[index]], self.written.at[stage])
