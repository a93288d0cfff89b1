"""The config.json of a DFlash head, in either of the forms that are published."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, listed_layer_type
from jaxis.errors import ConfigError

# Settings that other drafters of the same files have, and the values that mean DFlash's own.
_SUPPORTED = {
    "use_swa": False,
    "attention_sink_bias": False,
    "sample_from_anchor": False,
    "fc_layernorm": False,
    "projector_type": "dflash",
}


@dataclass(frozen=True)
class DFlashConfig:
    """What config.json says of a head beside the sizes of its layers.

    The authors' files (`DFlashDraftModel`, of Qwen3 layers) have some of it in `dflash_config`; transformers' own (Muse
    Glimmer's) have no such object.

    Attributes:
      block_size: Tokens that a block has at most: the newest one, and those that are drafted behind it.
      mask_token_id: Stands for the tokens that are to be drafted.
      target_layer_ids: The layers of the target whose outputs are read, in ascending order.
      num_target_layers: All that the target has; None if the file does not say.
      vocab_size: The target's; None if the file does not say.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int | None

    @classmethod
    def read(cls, config: HFConfig) -> DFlashConfig:
        """Reads config.json.

        Raises:
          ConfigError: A key is missing, or has a value that is not supported.
        """
        nested = _nested(config)
        for key, value in _SUPPORTED.items():
            (config if nested is None else nested).expect(key, value)
        config.ignore("tie_word_embeddings", because="embeddings and head are the target's")
        layer_ids = _setting(config, "target_layer_ids")
        is_list = isinstance(layer_ids, list) and bool(layer_ids) and all(type(each) is int for each in layer_ids)
        if not is_list or layer_ids[0] < 0 or any(a >= b for a, b in itertools.pairwise(layer_ids)):
            raise ConfigError(
                f"{config.source} has target_layer_ids={layer_ids!r}, expected numbers of layers in ascending order"
            )
        return cls(
            block_size=_integer(config, "block_size", least=2),
            mask_token_id=_integer(config, "mask_token_id", least=0),
            target_layer_ids=tuple(layer_ids),
            num_target_layers=config.get("num_target_layers"),
            vocab_size=config.get("vocab_size"),
        )


def dflash_layer_attention(config: HFConfig, layer_index: int) -> tuple[AttentionSpan, bool]:
    """The tokens that a layer's token sees, and whether that is nothing after itself.

    In the authors' files, layers with a window are causal, as vLLM runs them, unless a key says otherwise. In
    transformers' form, layers see as far ahead as back, which is by `sliding_window` tokens without their own.

    Args:
      config: Of the head.
      layer_index: From 0.

    Raises:
      ConfigError: `layer_types` has no known type for the layer, or there is no window for it.
    """
    config.ignore("max_window_layers", because="layer_types names each layer's type")
    config.ignore("sliding_window", because="only layers with a window use it")
    nested, kind = _nested(config), listed_layer_type(config, layer_index, FULL_ATTENTION, SLIDING_ATTENTION)
    if nested is None:
        if kind == FULL_ATTENTION:
            return FULL_CONTEXT, False
        return AttentionSpan(_integer(config, "sliding_window", least=1) + 1), False
    is_causal, has_windows = config.get("is_causal", nested.get("causal")), config.get("use_sliding_window", False)
    if kind != SLIDING_ATTENTION or not has_windows:
        return FULL_CONTEXT, bool(is_causal)
    return AttentionSpan(_integer(config, "sliding_window", least=1)), is_causal is None or bool(is_causal)


def _nested(config: HFConfig) -> HFConfig | None:
    nested = config.get("dflash_config")
    if nested is not None and not isinstance(nested, HFConfig):
        raise ConfigError(f"{config.source} has dflash_config={nested!r}, expected an object")
    return nested


def _setting(config: HFConfig, key: str) -> Any:
    nested = _nested(config)
    value = config.get(key) if nested is None else nested.get(key, config.get(key))
    if value is None:
        raise ConfigError(f"{config.source} has no {key!r}, which a DFlash head needs: it is not complete")
    return value


def _integer(config: HFConfig, key: str, *, least: int) -> int:
    value = _setting(config, key)
    if type(value) is not int or value < least:
        raise ConfigError(f"{config.source} has {key}={value!r}, expected an integer of at least {least}")
    return value
