"""ModernBERT (arXiv:2412.13663): rotary positions, norms before each block, a window in two of three layers."""

from __future__ import annotations

import jax

from jaxis.config.attention_span import WHOLE_SEQUENCE, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, listed_layer_type
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import layer_norm
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.models.common.decoder import DecoderOptions
from jaxis.pooling.classifier_settings import num_labels
from jaxis.pooling.encoders.text_encoder import TextEncoder
from jaxis.pooling.pooling_config import Mode
from jaxis.pooling.score_head import ScoreHead


class ModernBertLayer(JaxModule):
    """`x = x + self_attn(norm(x))`, in the first layer without the norm
    `x = x + mlp(norm(x))`
    """

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = _layer_type(config, scope.layer_index)
        use_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
        self.attn_norm = _norm(scope) if scope.layer_index else None
        self.self_attn = GroupedQueryAttention(
            scope / "self_attn",
            rope_settings=_rope(config, kind),
            packing=PACKED,
            use_bias=use_bias,
            span=_span(config, kind),
        )
        self.mlp_norm = _norm(scope)
        activation = config.get("hidden_activation", "gelu")
        self.mlp = GatedMLP(scope / "mlp", activation=activation, use_bias=mlp_bias, packed_gate_up=True)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        normed = x if self.attn_norm is None else self.attn_norm(x)
        kv_cache, attended = self.self_attn(kv_cache, normed, metadata)
        x = x + attended
        return kv_cache, x + self.mlp(self.mlp_norm(x), metadata)


class ModernBertModel(TextEncoder):
    """Encoder of gte-modernbert, modernbert-embed and others."""

    layer_class = ModernBertLayer
    renames = (
        ("embeddings.tok_embeddings", "embed_tokens"),
        ("embeddings.norm", "embed_norm"),
        ("attn.Wqkv", "self_attn.qkv_proj"),
        ("attn.Wo", "self_attn.o_proj"),
        ("mlp.Wi", "mlp.gate_up_proj"),
        ("mlp.Wo", "mlp.down_proj"),
        ("final_norm", "norm"),
    )
    prefixes = ("model.",)
    unused = ("head.", "decoder.", "classifier.")
    supported_values = (("position_embedding_type", "absolute", "sans_pos"),)  # which nothing reads
    ignored_keys = (
        (
            ("tie_word_embeddings", "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index"),
            "a head that predicts words is not loaded",
        ),
        (
            ("reference_compile", "repad_logits_with_grad", "deterministic_flash_attn", "layer_norm_eps"),
            "the reference does not compute with it, or uses norm_eps",
        ),
        (("classifier_pooling", "classifier_bias", "classifier_activation"), "a classifier's head reads it, if any"),
    )

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(norm=_norm(scope), embed_norm=_norm(scope))


class ModernBertForSequenceClassification(ModernBertModel):
    """Rerankers, such as gte-reranker-modernbert, and classifiers: a head on the first token, or on the mean."""

    renames = (*ModernBertModel.renames, ("head", "score"), ("classifier", "score.out_proj"))
    unused = ("decoder.",)

    def add_parts(self, scope: LayerScope) -> None:
        config, scope = scope.config, scope / "score"
        self.score = ScoreHead(
            scope,
            num_labels(config),
            activation=activation_function(config.get("classifier_activation", "gelu")),
            norm=_norm(never_quantized(scope)),
            use_bias=config.get("classifier_bias", False),
        )

    @classmethod
    def classifier_mode(cls, config: HFConfig) -> Mode:
        """Returns the pooling mode of the head's input."""
        mode = config.get("classifier_pooling", "cls")
        if mode not in ("cls", "mean"):
            raise ConfigError(f"{config.source} has classifier_pooling={mode!r}; cls and mean are supported")
        return mode


def _norm(scope: LayerScope) -> JaxLayerNorm:
    config = scope.config
    return layer_norm(scope, epsilon=config.get("norm_eps", 1e-5), use_bias=config.get("norm_bias", False))


def _layer_type(config: HFConfig, index: int) -> str:
    if (kind := listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)) is not None:
        config.ignore("global_attn_every_n_layers", because="layer_types names each layer's type")
        return kind
    return SLIDING_ATTENTION if index % config.get("global_attn_every_n_layers", 3) else FULL_ATTENTION


def _rope(config: HFConfig, kind: str) -> RopeConfig:
    # Names of transformers 4. Both are read, though a layer uses one of them.
    full, sliding = config.get("global_rope_theta", 160_000.0), config.get("local_rope_theta", 10_000.0)
    return rope_config(config, kind, default_theta=full, default_local_theta=sliding)


def _span(config: HFConfig, kind: str) -> AttentionSpan:
    half = config.get("local_attention", 128) // 2
    return WHOLE_SEQUENCE if kind == FULL_ATTENTION else AttentionSpan(sliding_window=half + 1, lookahead=half)
