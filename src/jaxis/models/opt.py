"""OPT (arXiv:2205.01068): learned positions, layer norms, biases, ReLU without a gate.

350M has norms after each block. Its embeddings are smaller than its layers, with a projection at each end instead of a
last norm.
"""

from __future__ import annotations

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, PreNormDecoderLayer
from jaxis.layers.embed import PositionEmbedding
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import linear
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderModel, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import biased_layer_norm


def _layer(scope: LayerScope) -> PreNormDecoderLayer | OPTPostNormDecoderLayer:
    attention = GroupedQueryAttention(
        scope / "self_attn",
        num_kv_heads=scope.config["num_attention_heads"],
        use_rope=False,
        use_bias=True,
    )
    activation = activation_function(scope.config.get("hidden_act", "relu"))
    mlp = UngatedMLP(scope / "mlp", activation=activation, use_bias=True)
    if _is_350m(scope.config):
        return OPTPostNormDecoderLayer(scope, self_attn=attention, mlp=mlp)
    return PreNormDecoderLayer(scope, self_attn=attention, mlp=mlp, make_norm=biased_layer_norm)


def _is_350m(config: HFConfig) -> bool:
    return not config.get("do_layer_norm_before", True)


class OPTPostNormDecoderLayer(JaxModule):
    """`x = norm(x + self_attn(x))`
    `x = norm(x + mlp(x))`
    """

    def __init__(self, scope: LayerScope, *, self_attn: GroupedQueryAttention, mlp: UngatedMLP) -> None:
        self.self_attn = self_attn
        self.input_layernorm = biased_layer_norm(scope)
        self.mlp = mlp
        self.post_attention_layernorm = biased_layer_norm(scope)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = self.input_layernorm(x + attended)
        return kv_cache, self.post_attention_layernorm(x + self.mlp(x, metadata))


class OutputProjection(JaxLinear):
    """A linear layer that sees only the tokens to sample from; requests' adapters may not change it."""


class OPTModel(DecoderModel):
    """The decoder; 350M has embeddings of `word_embed_proj_dim`, and no last norm."""

    def add_parts(self, scope: LayerScope) -> None:
        self.project_in = self.project_out = None
        if _is_350m(scope.config):
            outer, inner = scope.config["word_embed_proj_dim"], scope.config["hidden_size"]
            self.project_in = linear(scope / "project_in", outer, inner, axes=("embed", None))
            of_weights = (scope / "project_out").of_weights
            self.project_out = OutputProjection(inner, outer, use_bias=False, kernel_axes=(None, "embed"), **of_weights)

    def embed(self, input_ids: jax.Array) -> jax.Array:
        x = super().embed(input_ids)
        return x if self.project_in is None else self.project_in(x)


class NoNorm(JaxModule):
    """Placeholder of a norm that a model does not have."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def _final_norm(scope: LayerScope) -> Norm:
    return NoNorm() if _is_350m(scope.config) else biased_layer_norm(scope)


class OPTForCausalLM(CausalLM):
    layer_class = _layer
    make_final_norm = _final_norm
    tied_by_default = True
    model_class = OPTModel
    renames = (
        ("model.decoder.final_layer_norm", "model.norm"),
        ("model.decoder.project_in", "model.project_in"),
        ("model.decoder.project_out", "model.project_out"),
        ("final_layer_norm", "post_attention_layernorm"),
        ("self_attn_layer_norm", "input_layernorm"),
        ("model.decoder.embed_tokens", "model.embed_tokens"),
        ("model.decoder.embed_positions", "model.embed_positions"),
        ("model.decoder.layers", "model.layers"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("fc1", "mlp.up_proj"),
        ("fc2", "mlp.down_proj"),
    )
    # The first checkpoints have no prefix.
    other_names = (("model.decoder", "decoder"), ("decoder", "model.decoder"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(enable_bias=True, layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
        hidden_size: int = config["hidden_size"]
        size: int = config.get("word_embed_proj_dim", hidden_size)
        if (size != hidden_size) != _is_350m(config):
            raise config.fault(
                "word_embed_proj_dim",
                "hidden_size",
                why="but only norms after each block (do_layer_norm_before=false) are supported with sizes that "
                "differ, and only before it otherwise",
            )

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        positions = PositionEmbedding(
            config["max_position_embeddings"], config["hidden_size"], scope.rngs, offset=2, dtype=scope.dtype
        )
        is_350m = _is_350m(config)
        return DecoderOptions(
            embed_size=config["word_embed_proj_dim"] if is_350m else None,
            embed_positions=positions,
        )

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """Also applies the output projection of 350M before the embeddings decode the states."""
        assert isinstance(self.decoder, OPTModel)
        project_out = self.decoder.project_out
        return super().compute_logits(hidden_states if project_out is None else project_out(hidden_states))


FAMILY = Family(
    "OPT",
    (OPTForCausalLM,),
    "learned positions, LayerNorm, ReLU without a gate, biases; 350M: norms after each block, projected embeddings",
    names={"opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}},
    tiny={
        "word_embed_proj_dim": lambda twin: twin["hidden_size"] // (1 if twin.get("do_layer_norm_before", True) else 2)
    },
)
