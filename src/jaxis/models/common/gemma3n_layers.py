"""What config.json says of each of Gemma 3n's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import layer_span, layer_type
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.errors import ConfigError
from jaxis.models.common.shared_caches import cache_owner

FULL_EVERY = 5
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of a config.json that does not say


@dataclass(frozen=True)
class Gemma3nLayer:
    """A layer's attention, and its feed-forward block.

    Attributes:
      shares_cache_of: The layer whose keys and values this one attends to; None if it has its own.
      rope: Its rope.
      span: The tokens that a token sees.
      intermediate_size: F.
      sparsity: The share of the gates that are to be 0; 0 for a block that is not sparse.
    """

    shares_cache_of: int | None
    rope: RopeConfig
    span: AttentionSpan
    intermediate_size: int
    sparsity: float

    @classmethod
    def of(cls, config: HFConfig, index: int) -> Gemma3nLayer:
        """Reads the layer's settings.

        Raises:
          ConfigError: A key is missing or has no value for the layer, or no layer has the cache that it should share.
        """
        kinds = [layer_type(config, i, full_every=FULL_EVERY) for i in range(config["num_hidden_layers"])]
        return cls(
            cache_owner(config, kinds, index, default_sharing=15),
            rope_config(config, kinds[index]),
            layer_span(config, kinds[index], default_window=512),
            _intermediate_size(config, index),
            _sparsity(config, index),
        )


def _intermediate_size(config: HFConfig, index: int) -> int:
    sizes = config["intermediate_size"]
    size = _of_layer(config, "intermediate_size", sizes, index) if isinstance(sizes, list) else sizes
    if type(size) is not int or size < 1:
        raise ConfigError(f"{config.source} has intermediate_size={size!r}, expected integers of at least 1")
    return size


def _sparsity(config: HFConfig, index: int) -> float:
    listed = config.get("activation_sparsity_pattern")
    if listed is None:
        is_sparse = index < _SPARSE_LAYERS < config["num_hidden_layers"]
        return _SPARSITY if is_sparse else 0.0
    sparsity = _of_layer(config, "activation_sparsity_pattern", listed, index)
    if type(sparsity) not in (int, float) or not 0 <= sparsity < 1:
        raise ConfigError(
            f"{config.source} has activation_sparsity_pattern with {sparsity!r} for layer {index}, expected a number "
            "from 0 to less than 1: correct the file"
        )
    return float(sparsity)


def _of_layer(config: HFConfig, key: str, listed: Any, index: int) -> Any:
    if not isinstance(listed, list) or len(listed) != config["num_hidden_layers"]:
        raise ConfigError(f"{key}={listed!r} in {config.source} has not one number for each layer: correct the file")
    return listed[index]
