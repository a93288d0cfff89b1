"""Mistral Large 4: latents and selections shared between layers, queries scaled by position, learned rope."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.indexer import IndexerSizes
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.layers.shared_latent_attention import LogScaledIndexer, SharedLatentAttention
from jaxis.models.common.decoder import CausalLM, DecoderModel, DecoderOptions
from jaxis.models.common.deepseek import LatentAttentionSettings
from jaxis.models.common.family import Family
from jaxis.models.common.mistral import mistral_routing
from jaxis.models.common.no_rope_layers import has_rope
from jaxis.models.common.sparse_latent import TINY_INDEXER, layers_with_indexer
from jaxis.models.common.sparse_layers import dense_or_sparse, is_sparse_layer
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.pixtral import MistralLarge4Vision


class MistralLarge4DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        mlp = dense_or_sparse(
            scope,
            mistral_routing(config, float32_logits=True),
            is_sparse=is_sparse_layer(config, scope.layer_index, default_first_sparse=1),
            num_shared_experts=config.get("n_shared_experts", 1),
            use_selection_bias=False,
        )
        super().__init__(scope, self_attn=_attention(scope / "self_attn"), mlp=mlp)


def _attention(scope: LayerScope) -> SharedLatentAttention:
    config, index = scope.config, scope.layer_index
    settings, sources = LatentAttentionSettings.of(scope), _sources(scope)
    sizes = settings.sizes
    rope = settings.make_rope(interleaved=True) if has_rope(scope) else None
    if rope is None:
        sizes = dataclasses.replace(sizes, qk_nope_head_dim=sizes.qk_head_dim, qk_rope_head_dim=0)
    num_selected: int = config["index_topk"]
    indexer = None
    if layers_with_indexer(config)[index]:
        of_indexer = IndexerSizes(config["index_n_heads"], config["index_head_dim"], num_selected)
        indexer = LogScaledIndexer(scope / "indexer", of_indexer, rope=rope)
    return SharedLatentAttention(
        scope,
        sizes,
        indexer=indexer,
        num_selected=num_selected,
        rope=rope,
        scale=settings.scale,
        use_bias=settings.use_bias,
        shares_cache_of=None if sources[index] == index else sources[index],
        handed_on_as=index if index in sources[index + 1 :] else None,
    )


def _sources(scope: LayerScope) -> list[int]:
    """Returns for each layer the one whose latents it reads: itself, or the last one of its kind that others read.

    Raises ConfigError if config.json's list is not so.
    """
    config = scope.config
    kinds = [has_rope(dataclasses.replace(scope, layer_index=i)) for i in range(config["num_hidden_layers"])]
    sources: list[int] = config.get("kv_source_layers") or list(range(len(kinds)))
    if len(sources) != len(kinds):
        raise config.fault("kv_source_layers", why=f"expected one for each of {len(kinds)} layers")
    for i, source in enumerate(sources):
        read = [j for j in range(i) if sources[j] == j in sources[j + 1 :] and kinds[j] == kinds[i]]
        if source != i and [source] != read[-1:]:
            raise config.fault("kv_source_layers", why=f"of which layer {i} does not read the last one of its kind")
    return sources


class LearnedFactors(JaxModule):
    """Logarithms `alpha` of the factors of a rope's frequencies, float32 [rotary_dim / 2]."""

    def __init__(self, scope: LayerScope, num_pairs: int) -> None:
        self.alpha = make_parameter(scope.rngs, nnx.initializers.zeros, (num_pairs,), jnp.float32, axes=(None,))


class MistralLarge4Model(DecoderModel):
    def add_parts(self, scope: LayerScope) -> None:
        self.lerope = LearnedFactors(scope / "lerope", scope.config["qk_rope_head_dim"] // 2)

    @property
    def has_layer_inputs(self) -> bool:
        return True

    def layer_inputs(self, input_ids: jax.Array, embeddings: jax.Array) -> Sequence[tuple[jax.Array, ...]]:
        del input_ids, embeddings
        return [(jnp.exp(self.lerope.alpha[...]),)] * len(self.layers)


_PARTS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))


class MistralLarge4ForConditionalGeneration(TextPart, CausalLM):
    layer_class = MistralLarge4DecoderLayer
    model_class = MistralLarge4Model
    text_renames = ()
    tower = MistralLarge4Vision
    text_model_types = ("mistral_large4_text",)
    # The checkpoint's names are Mistral's own, without a prefix; modules have those of transformers.
    renames = (
        ("tok_embeddings", "model.embed_tokens"),
        ("lerope", "model.lerope"),
        ("layers", "model.layers"),
        ("norm", "model.norm"),
        ("output", "lm_head"),
        ("attention", "self_attn"),
        ("self_attn.wq", "self_attn.q_proj"),
        ("self_attn.wkv_a_with_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("self_attn.kv_a_norm", "self_attn.kv_a_layernorm"),
        ("self_attn.wkv_b", "self_attn.kv_b_proj"),
        ("self_attn.wo", "self_attn.o_proj"),
        ("ssmax_scaling", "query_scale"),
        ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("feed_forward", "mlp"),
        ("gate", "mlp.gate"),
        ("experts", "mlp.experts"),
        ("shared_experts", "mlp.shared_experts"),
        *((f"mlp.{name}", f"mlp.{here}") for name, here in _PARTS),
        *((f"shared_experts.{name}", f"shared_experts.{here}") for name, here in _PARTS),
    )
    module_renames = ()
    other_parts = (
        *("vision_encoder", "vision_language_adapter", "patch_merger", "pre_mm_projector_norm"),
        "mtp_dspark",  # drafts tokens
    )
    other_keys = ("projector_hidden_act", "vision_feature_layer", "spatial_merge_size", "multimodal_projector_bias")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.ignore("head_dim", because="the reference overwrites it with qk_rope_head_dim")
        if unknown := set(config.get("layer_types") or ()) - {"indexed_attention"}:
            raise config.fault("layer_types", why=f"with {min(map(repr, unknown))}, of which none is supported")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(logits_soft_cap=scope.config.get("final_logit_softcapping", 30.0))


FAMILY = Family(
    "Mistral Large 4",
    (MistralLarge4ForConditionalGeneration,),
    "latent attention to the tokens that an indexer selects; layers without RoPE, latents and selections that layers "
    "share, queries scaled by position, learned factors of the rope; 128 experts by softmax and a shared one",
    tiny=TINY_INDEXER,
)
