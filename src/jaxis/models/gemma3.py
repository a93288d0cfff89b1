"""Gemma 3 (arXiv:2503.19786): Gemma 2 with head norms, no soft caps; window and own rope in five of six layers."""

from __future__ import annotations

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import layer_span, layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM, gemma_mlp, gemma_norm
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.gemma3 import Gemma3Vision


class Gemma3DecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=6)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=256,
                rope_settings=rope_config(config, kind, default_theta=1_000_000.0, default_local_theta=10_000.0),
                scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
                use_bias=config.get("attention_bias", False),
                qk_norm=lambda _, head_dim: gemma_norm(scope, head_dim),
                span=self.span(config, kind),
            ),
            mlp=gemma_mlp(scope / "mlp"),
        )

    @classmethod
    def span(cls, config: HFConfig, kind: str) -> AttentionSpan:
        return layer_span(config, kind, default_window=4096)


class Gemma3ForCausalLM(GemmaCausalLM):
    layer_class = Gemma3DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        # The reference has the key but does not use it.
        config.expect("attn_logit_softcapping", None)
        if isinstance(ropes := config.get("rope_parameters"), HFConfig):
            ropes.ignore("sliding_attention", because="Rnj-1 has no layer with a window")


class Gemma3ForConditionalGeneration(TextPart, Gemma3ForCausalLM):
    """The multimodal checkpoints from 4B parameters on: the text model, with its image encoder."""

    is_tied_outside = True
    tower = Gemma3Vision
    text_model_types = ("gemma3_text",)
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = ("mm_tokens_per_image",)


FAMILY = Family(
    "Gemma 3; Rnj-1",
    (Gemma3ForCausalLM, Gemma3ForConditionalGeneration),
    "a window in five of six layers, with its own RoPE; norms on heads; SigLIP's tower, whose rows see each other",
    gguf=("gemma3",),
    # The `text_config` of multimodal checkpoints.
    defaults={
        "gemma3_text": {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
    },
    same_code={"rnj1": "gemma3_text", "Rnj1ForCausalLM": "Gemma3ForCausalLM"},
    other_names={"Rnj1ForCausalLM": Gemma3ForCausalLM},
)
