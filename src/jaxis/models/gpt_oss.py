"""GPT-OSS: attention sinks, a window in every other layer, biases everywhere, experts with a clamped gated unit."""

from __future__ import annotations

from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import layer_span, layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import ClampedGLU
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class GptOssDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=2)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                use_bias=config.get("attention_bias", True),
                span=layer_span(config, kind, default_window=128),
                use_sinks=True,
            ),
            mlp=SparseMoE(
                scope / "mlp",
                Routing.of(config, renormalize=True),
                intermediate_size=config["intermediate_size"],
                gated_unit=ClampedGLU(config.get("swiglu_limit", 7.0), _alpha(config)),
                use_bias=True,
                stack_layout=StackLayout(transposed=True, interleaved=True),
            ),
        )


def _alpha(config: HFConfig) -> float:
    """Returns the factor of the unit, which has either of two names in config.json."""
    names = [name for name in ("swiglu_alpha", "hidden_act_alpha") if name in config]
    if len(names) > 1:
        return value_of_either(config, *names)
    return config.get(names[0] if names else "swiglu_alpha", 1.702)


class GptOssForCausalLM(CausalLM):
    layer_class = GptOssDecoderLayer
    router_aux_loss_coef = 0.001
    renames = (("mlp.router", "mlp.gate"),)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        # The clamped unit is a SiLU gate with an alpha.
        config.expect_all(hidden_act="silu", norm_topk_prob=True)
        # The published configs have these two under two names.
        config.expect("experts_per_token", config["num_experts_per_tok"])
        rope = config.get("rope_scaling", config.get("rope_parameters", {}))
        config.expect("initial_context_length", rope.get("original_max_position_embeddings"))


FAMILY = Family(
    "GPT-OSS",
    (GptOssForCausalLM,),
    "attention sinks, a window in every other layer, clamped gated unit, biases everywhere",
    formats=("MXFP4",),
    gguf=("gpt-oss",),
)
