"""Models whose last layers attend to the keys and values of earlier ones (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.module import named_modules
from jaxis.layers.shared_cache_attention import SharedCacheAttention
from jaxis.models.common.decoder import CausalLM

_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")


def cache_owner(config: HFConfig, kinds: Sequence[str], index: int, *, default_sharing: int = 0) -> int | None:
    """The layer whose keys and values a layer attends to: the last of its kind that has any.

    Args:
      config: Of the model.
      kinds: The type of each layer.
      index: The layer's.
      default_sharing: The number of layers that share, where config.json does not have `num_kv_shared_layers`.

    Returns:
      Its index; None for a layer with keys and values of its own, as all but the last `num_kv_shared_layers` are.

    Raises:
      ConfigError: There is no such layer.
    """
    num_layers = len(kinds)
    num_owners = num_layers - config.get("num_kv_shared_layers", default_sharing)
    if index < num_owners:
        return None
    for owner in reversed(range(num_owners)):
        if kinds[owner] == kinds[index]:
            return owner
    raise ConfigError(
        f"num_kv_shared_layers={num_layers - num_owners} in {config.source}: layer {index} of {num_layers} shares the "
        f"keys and values of an earlier {kinds[index]!r} layer, and none of the first {max(0, num_owners)} is one"
    )


class SharedCacheCausalLM(CausalLM):
    """A model with `SharedCacheAttention` in some layers."""

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """See `CausalLM`; checkpoints also have keys and values of layers that attend to another's, and drop here."""
        modules = named_modules(self.decoder, self.decoder_name)
        sharing = [name for name, module in modules if isinstance(module, SharedCacheAttention)]
        unused = tuple(f"{name}.{part}." for name in sharing for part in _KEYS_AND_VALUES)
        return super().without_redundant_tensors(
            (name, tensor) for name, tensor in weights if not name.startswith(unused)
        )
