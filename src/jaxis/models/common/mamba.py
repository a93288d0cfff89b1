"""Code shared by families with Mamba2 layers: their config keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, listed_layer_type
from jaxis.layers.mamba2 import Mamba2, Mamba2Sizes
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import TinySizes

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
MAMBA_RENAMES = (("backbone", "model"), ("model.embeddings", "model.embed_tokens"), ("model.norm_f", "model.norm"))
"""Names of the decoder and its parts in checkpoints whose layers are single mixers -> their names here."""


def has_mamba(config: HFConfig, layer_index: int) -> bool:
    """True if the layer is a Mamba2 layer by `layer_types`; without that list, all layers are.

    Raises ConfigError if `layer_types` is too short or has an unknown type for the layer.
    """
    kind = listed_layer_type(config, layer_index, LINEAR_ATTENTION, FULL_ATTENTION, "mamba", "attention")
    return kind in (None, LINEAR_ATTENTION, "mamba")


def mamba_of_prefixed_keys(
    scope: LayerScope,
    *,
    inner_size: int | None = None,
    out_bias: bool | None = None,
    has_norm: bool = True,
    multipliers: tuple[float, ...] | None = None,
) -> Mamba2:
    """The Mamba2 layer of a family whose keys begin with `mamba_`, such as Bamba, Granite and Falcon.

    `inner_size`, the features of all heads together, is `mamba_expand` times `hidden_size` by default; `out_proj` has a
    bias if `in_proj` has one, by default. `multipliers` are those of `Mamba2`. Raises ConfigError if number and size of
    heads contradict the size of all together.
    """
    config = scope.config
    num_heads: int = config.get("mamba_n_heads", 128)
    expected = config.get("mamba_expand", 2) * config["hidden_size"] if inner_size is None else inner_size
    head_dim = config.get("mamba_d_head", "auto")
    head_dim = expected // num_heads if head_dim == "auto" else head_dim
    if num_heads * head_dim != expected:
        raise config.fault(
            "mamba_n_heads", "mamba_d_head", why=f"but Mamba2 layers of {expected} features: correct the file"
        )
    sizes = Mamba2Sizes(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.get("mamba_d_state", 256),
        num_groups=config.get("mamba_n_groups", 1),
        conv_width=config.get("mamba_d_conv", 4),
    )
    use_bias = config.get("mamba_proj_bias", False)
    return Mamba2(
        scope,
        sizes,
        conv_bias=config.get("mamba_conv_bias", True),
        in_bias=use_bias,
        out_bias=use_bias if out_bias is None else out_bias,
        norm_epsilon=config["rms_norm_eps"] if has_norm else None,
        multipliers=multipliers,
    )


def check_mamba_keys(config: HFConfig) -> None:
    """Declares config keys common to families with Mamba2. Raises ConfigError if a value is not supported."""
    limit = config.get("time_step_limit")
    if not (isinstance(limit, list) and len(limit) == 2 and limit[0] == 0 and _is_no_limit(limit[1])):
        config.expect("time_step_limit", [0.0, math.inf])
    for key in ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"):
        config.ignore(key, because="it says how training begins")
    for key in ("chunk_size", "mamba_chunk_size"):
        config.ignore(key, because="the result of the recurrence does not depend on how it is cut")
    config.ignore("mamba_ssm_dtype", "mamba_ssm_cache_dtype", because="states are float32")
    config.ignore("residual_in_fp32", because="residuals have the type of the activations")
    config.ignore("rescale_prenorm_residual", because="it says how training begins")
    for key in ("use_mamba_kernels", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"):
        config.ignore(key, because="kernels are chosen by the device")
    config.ignore("num_logits_to_keep", because="the engine knows whose logits it needs")


def _is_no_limit(value: Any) -> bool:
    """True if the value is infinite. JSON has no infinity: it is written as text, an object or a huge number."""
    if isinstance(value, int | float):
        return value >= _LARGEST_FLOAT32
    return value in ("Infinity", {"__float__": "Infinity"})


def ignore_rope(config: HFConfig) -> None:
    """Declares the keys of the rope and of the context length, which matter only with a rope."""
    keys = ("max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
    config.ignore(*keys, because="no layer has a rope")


def tiny_inner_size(twin: Mapping[str, Any]) -> int:
    """Returns the number of channels of a tiny twin's Mamba layers."""
    return twin.get("expand", twin.get("mamba_expand", 2)) * twin["hidden_size"]


# `Family.tiny` of Mamba2 layers. The number of heads times their size is the number of channels.
TINY_MAMBA2: TinySizes = {
    "mamba_n_heads": lambda twin: tiny_inner_size(twin) // 16,
    "mamba_d_head": 16,
    "mamba_d_state": 24,
}
