"""NanoChat as a family of a package outside jaxis would be: its reference calls `model.norm` twice, without weights."""

import dataclasses

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.models.common.decoder import CausalLM, DecoderOptions

CONFIG = {
    "architectures": ["NanoChatForCausalLM"],
    "model_type": "nanochat",
    "vocab_size": 50304,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 2048,
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 15.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def _norm(scope):
    return rms_norm(scope, use_weight=False)


class NanoChatDecoderLayer(PreNormDecoderLayer):
    norm_after_rope = True
    head_epsilon = None

    def __init__(self, scope):
        config = scope.config
        attention = GroupedQueryAttention(
            scope / "self_attn",
            qkv_bias=config.get("attention_bias", False),
            qk_norm=lambda _, size: rms_norm(scope, size, use_weight=False, epsilon=self.head_epsilon),
            norm_after_rope=self.norm_after_rope,
        )
        rope = attention.rope
        attention.rope = dataclasses.replace(rope, inv_freq=tuple(-frequency for frequency in rope.inv_freq))
        activation = activation_function(config.get("hidden_act", "relu2"))
        super().__init__(
            scope, self_attn=attention, mlp=UngatedMLP(scope / "mlp", activation=activation), make_norm=_norm
        )


class NanoChatForCausalLM(CausalLM):
    layer_class = NanoChatDecoderLayer
    renames = (("mlp.fc1", "mlp.up_proj"), ("mlp.fc2", "mlp.down_proj"))

    @classmethod
    def options(cls, scope):
        cap = scope.config.get("final_logit_softcapping", 15.0)
        return DecoderOptions(norm=_norm(scope), embed_norm=_norm(scope), logits_soft_cap=cap)


class NormBeforeRopeLayer(NanoChatDecoderLayer):
    """The same function with other borders: a rotation does not change a head's norm."""

    norm_after_rope = False


class OtherHeadEpsilonLayer(NanoChatDecoderLayer):
    head_epsilon = 1e-5


class NoHeadNormsLayer(NanoChatDecoderLayer):
    def __init__(self, scope):
        super().__init__(scope)
        self.self_attn.q_norm = self.self_attn.k_norm = None


class RopeOfTheUsualSignLayer(NanoChatDecoderLayer):
    def __init__(self, scope):
        super().__init__(scope)
        rope = self.self_attn.rope
        self.self_attn.rope = dataclasses.replace(rope, inv_freq=tuple(-frequency for frequency in rope.inv_freq))


class NoNormOfEmbeddings(NanoChatForCausalLM):
    @classmethod
    def options(cls, scope):
        return dataclasses.replace(super().options(scope), embed_norm=None)


def with_layers(layer_class):
    """The model with other layers."""
    return type("Changed", (NanoChatForCausalLM,), {"layer_class": layer_class})
