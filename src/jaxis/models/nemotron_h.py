"""Nemotron-H and Nemotron 3: each layer is Mamba2, attention without positions, a dense block or experts."""

from __future__ import annotations

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, MixerLayer
from jaxis.layers.glu import Ungated
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mamba2 import Mamba2, Mamba2Sizes
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.moe import SparseMoE
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import MAMBA_RENAMES, check_mamba_keys, ignore_rope
from jaxis.models.common.prediction_layers import PredictionNames, num_prediction_layers
from jaxis.models.common.sparse_layers import ignore_sizes_of_other_layers, sigmoid_routing


class NemotronHDecoderLayer(MixerLayer):
    def __init__(self, scope: LayerScope) -> None:
        make = _MIXERS[_layer_kinds(scope.config)[scope.layer_index]]
        super().__init__(scope, make(scope / "mixer"), epsilon=scope.config.get("layer_norm_epsilon", 1e-5))


class NemotronHPredictionBlock(JaxModule):
    """The block that predicts later tokens: one layer of attention, and others without a cache."""

    def __init__(self, scope: LayerScope) -> None:
        epsilon = scope.config.get("layer_norm_epsilon", 1e-5)
        self.layers = []
        for i, kind in enumerate(_prediction_kinds(scope.config)):
            layer = scope / "layers" / str(i)
            self.layers.append(MixerLayer(layer, _MIXERS[kind](layer / "mixer"), epsilon=epsilon))

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache of the attention (None without one) and [T, E]."""
        for layer in self.layers:
            kv_cache, x = layer(kv_cache, x, metadata)
        return kv_cache, x


def _norm(scope: LayerScope) -> Norm:
    return rms_norm(scope, epsilon=scope.config.get("layer_norm_epsilon", 1e-5))


class NemotronHForCausalLM(CausalLM):
    layer_class = NemotronHDecoderLayer
    make_final_norm = _norm
    prediction_modules = ("mtp.",)
    renames = MAMBA_RENAMES
    module_renames = MAMBA_RENAMES[1:]  # transformers' model has no backbone
    unadaptable = ("out_proj",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        ignore_rope(config)
        ignore_sizes_of_other_layers(config)
        config.expect_all(rms_norm_eps=config.get("layer_norm_epsilon", 1e-5), mamba_hidden_act="silu")
        config.expect_all(mamba_proj_bias=config.get("use_bias", False), attention_bias=False, sliding_window=None)
        config.expect("n_shared_experts", 1)
        config.ignore(*_KEYS_OF_ONE_KIND, because="layers of another kind do not have it")
        config.ignore("expand", because="Mamba2's heads and their size are given")
        config.ignore("moe_shared_expert_overlap", because="it says what runs at the same time")
        for key in ("mtp_layers_block_type", "mtp_hybrid_override_pattern"):
            config.ignore(key, because="layers that predict later tokens do not change logits")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(num_layers=len(_layer_kinds(scope.config)))

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        """Returns the block that predicts the token after the next one.

        None unless there is exactly one such block, with one layer of attention and no recurrent state.
        """
        kinds = _prediction_kinds(config)
        if num_prediction_layers(config) != 1 or kinds.count("*") != 1 or not set(kinds) <= set("*E-"):
            return None
        return PredictionNames(
            module="mtp",
            embedding_norm="layers.0.enorm",
            hidden_norm="layers.0.hnorm",
            projection="layers.0.eh_proj",
            norm=f"layers.{len(kinds) - 1}.final_layernorm",
            layer="",
            layer_index=0,
            layer_class=NemotronHPredictionBlock,
            make_norm=_norm,
        )


def _prediction_kinds(config: HFConfig) -> str:
    """Returns the letters of `_layer_kinds` for the layers that predict later tokens."""
    listed = config.get("mtp_layers_block_type", ["attention", "moe"])
    return config.get("mtp_hybrid_override_pattern") or "".join(_LETTERS.get(name, "?") for name in listed)


def _mamba(scope: LayerScope) -> Mamba2:
    config = scope.config
    use_bias = config.get("use_bias", False)
    sizes = Mamba2Sizes(
        num_heads=config.get("mamba_num_heads", 128),
        head_dim=config.get("mamba_head_dim", 64),
        state_size=config.get("ssm_state_size", 128),
        num_groups=config.get("n_groups", 8),
        conv_width=config.get("conv_kernel", 4),
    )
    return Mamba2(
        scope,
        sizes,
        conv_bias=config.get("use_conv_bias", True),
        in_bias=use_bias,
        out_bias=use_bias,
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    return GroupedQueryAttention(scope, head_dim=scope.config.get("attention_head_dim", 128), use_rope=False)


def _mlp(scope: LayerScope, intermediate_size: int | None = None) -> UngatedMLP:
    config = scope.config
    return UngatedMLP(
        scope,
        activation=activation_function(config.get("mlp_hidden_act", "relu2")),
        intermediate_size=intermediate_size,
        use_bias=config.get("mlp_bias", False),
    )


def _moe(scope: LayerScope) -> SparseMoE:
    config = scope.config
    config.expect("mlp_bias", False)
    return SparseMoE(
        scope,
        sigmoid_routing(config),
        gated_unit=Ungated(activation_function(config.get("mlp_hidden_act", "relu2"))),
        shared_experts=_mlp(scope / "shared_experts", config["moe_shared_expert_intermediate_size"]),
        use_selection_bias=True,
        latent_size=config.get("moe_latent_size"),
    )


# Keys that only attention, Mamba2, dense blocks or experts read; a model may lack any of these.
_KEYS_OF_ONE_KIND = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias"),
    *("mlp_hidden_act", "mlp_bias", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "norm_topk_prob", "routed_scaling_factor"),
)
_MIXERS = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}
_LETTERS = {
    **{"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"},
    **{"mlp": "-", "moe": "E"},
}


def _layer_kinds(config: HFConfig) -> str:
    """Returns a letter per layer, as in `hybrid_override_pattern`; config.json may list names instead.

    Raises ConfigError if the key is missing, a layer has an unknown kind, or the number of layers differs.
    """
    listed = config.get("layers_block_type")
    if listed is None:
        kinds = config["hybrid_override_pattern"]
    else:
        config.ignore("hybrid_override_pattern", because="layers_block_type names each layer's kind")
        kinds = "".join(_LETTERS.get(name, "?") for name in listed)
    if not set(kinds) <= set(_MIXERS):
        key = "hybrid_override_pattern" if listed is None else "layers_block_type"
        raise config.fault(key, why=f"expected layers of {', '.join(_MIXERS)} or {', '.join(_LETTERS)}")
    if config.get("num_hidden_layers", len(kinds)) != len(kinds):
        raise config.fault("num_hidden_layers", why=f"but names the kinds of {len(kinds)} layers: correct the file")
    return kinds


FAMILY = Family(
    "Nemotron-H, Nemotron Nano v2, Nemotron 3",
    (NemotronHForCausalLM,),
    "each layer is one of Mamba2, attention without RoPE, a feed-forward block or experts; neither has a "
    "gate; experts between latent projections (Super, Ultra)",
    gguf=("nemotron_h", "nemotron_h_moe"),
)
