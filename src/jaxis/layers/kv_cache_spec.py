"""What a layer keeps of each token in the paged cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxis.errors import ConfigError
from jaxis.kernels.ragged_paged_attention import kv_cache_shape


@dataclass(frozen=True)
class KVCacheSpec:
    """Keys and values of K heads of D numbers.

    Attributes:
      num_kv_heads: K.
      head_dim: D.
      sliding_window: The layer reads a token and this many - 1 before it; None reads all before it.
      attention_chunk_size: The layer reads a token's own chunk of so many tokens, up to it; None reads all before it.
    """

    head_axis_name: ClassVar[str | None] = "kv_heads"

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def shape(self, num_blocks: int, block_size: int, dtype: Any) -> tuple[int, ...]:
        """The shape of the layer's cache; its last axis but one is `head_axis_name`."""
        return kv_cache_shape(num_blocks, block_size, self.num_kv_heads, self.head_dim, dtype)

    def on_devices(self, tensor_parallel_size: int) -> KVCacheSpec:
        """The spec with each kv head as often as devices need it, where there are fewer heads than devices.

        Raises:
          ConfigError: Heads and devices do not divide one another.
        """
        heads = self.num_kv_heads
        if heads % tensor_parallel_size and tensor_parallel_size % heads:
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size} and the model's {heads} key-value heads: "
                "one must divide the other"
            )
        return dataclasses.replace(self, num_kv_heads=max(heads, tensor_parallel_size))
