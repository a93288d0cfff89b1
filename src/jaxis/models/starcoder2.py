"""StarCoder2 (arXiv:2402.19173): layer norms and biases throughout, a feed-forward block without a gate."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import uniform_span
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import layer_norm
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


def _norm(scope: LayerScope) -> JaxLayerNorm:
    return layer_norm(scope, epsilon=scope.config.get("norm_epsilon", 1e-5))


class Starcoder2DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias, span = config.get("use_bias", True), uniform_span(config, config.get("sliding_window"))
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", use_bias=use_bias, span=span),
            mlp=UngatedMLP(
                scope / "mlp",
                activation=activation_function(config.get("hidden_act", "gelu_pytorch_tanh")),
                use_bias=use_bias,
            ),
        )


class Starcoder2ForCausalLM(CausalLM):
    layer_class = Starcoder2DecoderLayer
    make_norm = _norm
    tied_by_default = True
    renames = (("mlp.c_fc", "mlp.up_proj"), ("mlp.c_proj", "mlp.down_proj"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(norm_type="layer_norm", mlp_type="default")
        # GPT-BigCode's key, which the reference does not read: the kind of GELU is in `hidden_act`.
        config.expect("activation_function", config.get("hidden_act", "gelu_pytorch_tanh"), "gelu")


FAMILY = Family("StarCoder2", (Starcoder2ForCausalLM,), "LayerNorm, plain feed-forward, biases", gguf=("starcoder2",))
