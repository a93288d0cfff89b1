"""Checks the sizes in a config.json before a model is made of them."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError

_MAX = 2**31 - 1
# Key -> the least value: 0 where it may stand for a part that a model does not have.
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 1),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "decoder_sparse_step"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"), 0),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 0),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1),
}


def check_sizes(config: HFConfig) -> None:
    """Checks a config, and its `text_config` if it has one; does not count as reading.

    Raises:
      ConfigError: A size is no integer, or too small.
    """
    for part in (config.to_dict(), config.to_dict().get("text_config")):
        if not isinstance(part, dict):
            continue
        for key, least in _SIZES.items():
            value = part.get(key)
            if value is not None and not (type(value) is int and least <= value <= _MAX):
                raise ConfigError(
                    f"{config.source} has {key}={value!r}, expected an integer of at least {least}: correct the file"
                )
