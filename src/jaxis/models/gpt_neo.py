"""GPT-Neo: GPT-2's layer with a window in every other layer and scores that are not scaled."""

from __future__ import annotations

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gpt2 import Gpt2CausalLM, ungated_mlp


class GPTNeoDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=scope.config["num_attention_heads"],
                use_rope=False,
                scale=1.0,
                o_bias=True,
                span=_span(scope),
            ),
            mlp=ungated_mlp(scope / "mlp", "gelu_new"),
        )


def _span(scope: LayerScope) -> AttentionSpan:
    """Returns the span by config.json's `[[["global", "local"], 12]]`: kinds of layers and how often they repeat."""
    config = scope.config
    kinds = [kind for group, times in config["attention_types"] for _ in range(times) for kind in group]
    kind = kinds[scope.layer_index] if scope.layer_index < len(kinds) else None
    if kind not in ("global", "local"):
        why = f"{kind!r} for layer {scope.layer_index}, expected 'global' or 'local'"
        raise config.fault("attention_types", why=why)
    return AttentionSpan(config.get("window_size", 256)) if kind == "local" else FULL_CONTEXT


class GPTNeoForCausalLM(Gpt2CausalLM):
    layer_class = GPTNeoDecoderLayer
    renames = (
        *(rename for rename in Gpt2CausalLM.renames if not rename[0].startswith("attn.")),
        ("attn.attention", "self_attn"),
        ("self_attn.out_proj", "self_attn.o_proj"),
    )
    buffers = (".self_attn.bias", ".self_attn.masked_bias")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.ignore("attention_layers", because="attention_types says it")
        config.ignore("window_size", because="only layers with a window use it")


FAMILY = Family(
    "GPT-Neo",
    (GPTNeoForCausalLM,),
    "as GPT-2, with a window of 256 in every other layer",
    names={
        "gpt_neo": {
            "num_heads": "num_attention_heads",
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "layer_norm_eps",
            "activation_function": "hidden_act",
        }
    },
)
