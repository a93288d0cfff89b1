"""Mamba (arXiv:2312.00752) and Falcon Mamba: Mamba in every layer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import MixerLayer
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mamba1 import Mamba1, Mamba1Sizes, time_step_rank
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import MAMBA_RENAMES, check_mamba_keys, ignore_rope, tiny_inner_size


class MambaDecoderLayer(MixerLayer):
    def __init__(self, scope: LayerScope, *, norm_epsilon: float | None = None) -> None:
        config = scope.config
        sizes = Mamba1Sizes(
            num_channels=_num_channels(config),
            state_size=config.get("state_size", 16),
            time_step_rank=time_step_rank(config, "time_step_rank"),
            conv_width=config.get("conv_kernel", 4),
        )
        mixer = Mamba1(
            scope / "mixer",
            sizes,
            conv_bias=config.get("use_conv_bias", True),
            use_bias=config.get("use_bias", False),
            norm_epsilon=norm_epsilon,
            norm_weights=False,
        )
        super().__init__(scope, mixer, epsilon=config.get("layer_norm_epsilon", 1e-5))


class FalconMambaDecoderLayer(MambaDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, norm_epsilon=scope.config.get("mixer_rms_eps", 1e-6))


def _final_norm(scope: LayerScope) -> Norm:
    return rms_norm(scope, epsilon=scope.config.get("layer_norm_epsilon", 1e-5))


class MambaForCausalLM(CausalLM):
    make_final_norm = _final_norm
    layer_class = MambaDecoderLayer
    tied_by_default = True
    renames = MAMBA_RENAMES
    other_names = (("backbone.embedding", "backbone.embeddings"),)  # of the first checkpoints
    unadaptable = ("dt_proj", "out_proj")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        ignore_rope(config)
        config.expect("hidden_act", "silu")
        config.ignore(*_OF_TRAINING, because="it says how training begins")
        config.expect("rms_norm", True)
        config.ignore(*_OF_MAKERS, because="only the makers' own code reads it")
        config.ignore("num_attention_heads", "num_key_value_heads", because="there is nothing but Mamba")


class FalconMambaForCausalLM(MambaForCausalLM):
    layer_class = FalconMambaDecoderLayer


_OF_TRAINING = ("time_step_scale", "time_step_init_scheme")
_OF_MAKERS = ("d_model", "d_inner", "n_layer", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple")


def _num_channels(config: HFConfig) -> int:
    # The reference uses `intermediate_size`; Falcon Mamba's `expand` contradicts it.
    if (size := config.get("intermediate_size")) is None:
        return int(config.get("expand", 2) * config["hidden_size"])
    config.ignore("expand", because="intermediate_size has the number of channels")
    if type(size) is not int or size < 1:
        raise config.fault("intermediate_size", why="expected an integer of at least 1")
    return size


FAMILY = Family(
    "Mamba; Falcon Mamba",
    (MambaForCausalLM, FalconMambaForCausalLM),
    "Mamba in every layer, no attention; Falcon Mamba has norms without weights",
    gguf=("mamba",),
    tiny={
        "state_size": 24,
        "intermediate_size": tiny_inner_size,
        "d_inner": tiny_inner_size,
        "d_model": lambda twin: twin["hidden_size"],
        "time_step_rank": 7,
    },
)
