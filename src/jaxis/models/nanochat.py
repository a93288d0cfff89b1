"""NanoChat: norms without weights, also of the embeddings; a rope that rotates backwards; a squared ReLU, no gate."""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family

_norm = partial(rms_norm, use_weight=False)


class NanoChatDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        attention = GroupedQueryAttention(
            scope / "self_attn",
            use_bias=config.get("attention_bias", False),
            qk_norm=lambda _, head_dim: _norm(scope, head_dim),
            norm_after_rope=True,
        )
        attention.rope = _backwards(attention.rope, config.source)
        mlp = UngatedMLP(scope / "mlp", activation=activation_function(config.get("hidden_act", "relu2")))
        super().__init__(scope, self_attn=attention, mlp=mlp)


class NanoChatForCausalLM(CausalLM):
    layer_class = NanoChatDecoderLayer
    make_norm = _norm
    renames = (("mlp.fc1", "mlp.up_proj"), ("mlp.fc2", "mlp.down_proj"))

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        cap = scope.config.get("final_logit_softcapping", 15.0) or None
        return DecoderOptions(embed_norm=_norm(scope), logits_soft_cap=cap)


def _backwards(rope: RotaryEmbedding | None, source: str) -> RotaryEmbedding:
    """Returns a rope by the opposite angles. Raises ConfigError if its frequencies depend on the sequence."""
    if type(rope) is not RotaryEmbedding:
        raise ConfigError(f"{source} has a rope whose frequencies depend on the length, which is not supported")
    return dataclasses.replace(rope, inv_freq=tuple(-frequency for frequency in rope.inv_freq))


FAMILY = Family(
    "NanoChat",
    (NanoChatForCausalLM,),
    "norms without weights, a rope that rotates backwards, squared ReLU without a gate",
)
