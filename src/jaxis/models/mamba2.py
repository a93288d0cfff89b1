"""Mamba2 (arXiv:2405.21060) and Codestral Mamba: Mamba2 in every layer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import MixerLayer
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mamba2 import Mamba2, Mamba2Sizes
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import MAMBA_RENAMES, check_mamba_keys, ignore_rope, tiny_inner_size


class Mamba2DecoderLayer(MixerLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        epsilon, use_bias = config.get("layer_norm_epsilon", 1e-5), config.get("use_bias", False)
        sizes = Mamba2Sizes(
            num_heads=config["num_heads"],
            head_dim=config["head_dim"],
            state_size=config["state_size"],
            num_groups=config.get("n_groups", 8),
            conv_width=config.get("conv_kernel", 4),
        )
        mixer = Mamba2(
            scope / "mixer",
            sizes,
            conv_bias=config.get("use_conv_bias", True),
            in_bias=use_bias,
            out_bias=use_bias,
            norm_epsilon=epsilon,
        )
        super().__init__(scope, mixer, epsilon=epsilon)


def _final_norm(scope: LayerScope) -> Norm:
    return rms_norm(scope, epsilon=scope.config.get("layer_norm_epsilon", 1e-5))


class Mamba2ForCausalLM(CausalLM):
    make_final_norm = _final_norm
    layer_class = Mamba2DecoderLayer
    renames = MAMBA_RENAMES
    unadaptable = ("out_proj",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        ignore_rope(config)
        config.expect("hidden_act", "silu")
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            config.ignore(key, because="there is nothing but Mamba2")
        config.expect("expand", config["num_heads"] * config["head_dim"] / config["hidden_size"])


FAMILY = Family(
    "Mamba2, Codestral Mamba",
    (Mamba2ForCausalLM,),
    "Mamba2 in every layer, no attention",
    gguf=("mamba2",),
    tiny={
        "state_size": 24,
        "num_heads": lambda twin: tiny_inner_size(twin) // 16,
        "head_dim": 16,
        "n_groups": lambda twin: min(twin["n_groups"], 2),
        "time_step_rank": 7,
    },
)
