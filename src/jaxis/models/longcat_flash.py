"""LongCat-Flash: two blocks of latent attention a layer and experts beside them; LongCat-Flash-Lite adds n-grams."""

from __future__ import annotations

from typing import Any

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mla import MultiHeadLatentAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.moe import SparseMoE
from jaxis.layers.ngram_mean import NgramMean
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import latent_attention
from jaxis.models.common.family import Family


class LongcatFlashDecoderLayer(JaxModule):
    """`x = x + self_attn.0(norm(x)); y = norm(x); x = x + mlps.0(y)`
    `x = x + self_attn.1(norm(x)); x = x + mlps.1(norm(x)) + mlp(y)`, where mlp is a mixture of experts.
    """

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        num_identity: int = config.get("zero_expert_num", 256) or 0
        routing = Routing(
            num_experts=config["n_routed_experts"] + num_identity,
            num_experts_per_token=config["num_experts_per_tok"],
            scaling_factor=config.get("routed_scaling_factor", 6.0),
            float32_logits=True,
            num_identity=num_identity,
        )
        self.input_layernorm = [rms_norm(scope) for _ in range(2)]
        self.self_attn = [_attention(scope / "self_attn" / str(i)) for i in range(2)]
        self.post_attention_layernorm = [rms_norm(scope) for _ in range(2)]
        self.mlps = [GatedMLP(scope / "mlps" / str(i)) for i in range(2)]
        self.mlp = SparseMoE(scope / "mlp", routing, use_selection_bias=True)

    def __call__(self, kv_cache: tuple[Any, ...], x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        first, attended = self.self_attn[0](kv_cache[0], self.input_layernorm[0](x), metadata)
        x = x + attended
        normed = self.post_attention_layernorm[0](x)
        of_experts = self.mlp(normed, metadata)
        x = x + self.mlps[0](normed)
        second, attended = self.self_attn[1](kv_cache[1], self.input_layernorm[1](x), metadata)
        x = x + attended
        return (first, second), x + self.mlps[1](self.post_attention_layernorm[1](x)) + of_experts


def _attention(scope: LayerScope) -> MultiHeadLatentAttention:
    attention = latent_attention(scope)
    sizes = attention.sizes
    # The reference multiplies queries, of which scores are linear.
    attention.scale *= (sizes.hidden_size / (sizes.q_lora_rank or sizes.hidden_size)) ** 0.5
    attention.latent_multiplier = (sizes.hidden_size / sizes.kv_lora_rank) ** 0.5
    return attention


class LongcatFlashForCausalLM(CausalLM):
    layer_class = LongcatFlashDecoderLayer
    prediction_modules = ("model.mtp",)
    renames = (
        ("mlp.router.classifier", "mlp.gate"),
        ("mlp.router.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
    )
    unadaptable = ("mlp.router.classifier",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(zero_expert_type="identity", attention_method="MLA", mla_scale_q_lora=True)
        config.expect_all(mla_scale_kv_lora=True, router_bias=False, norm_topk_prob=False)


class LongcatFlashNgramDecoderLayer(LongcatFlashDecoderLayer):
    """The first layer, whose input is the mean with embeddings of n-grams, and the others, as without them."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        # Its name comes before that of attention: their caches are in this order.
        self.ngram_embeddings = None
        self.uses_token_ids = scope.layer_index == 0
        if self.uses_token_ids:
            end = config.get("eos_token_id", 2)
            self.ngram_embeddings = NgramMean(
                scope / "ngram_embeddings",
                order=config["emb_neighbor_num"],
                splits=config["emb_split_num"],
                base=int(config["ngram_vocab_size_ratio"] * config["vocab_size"]),
                end=end[0] if isinstance(end, list) else end,
            )
        super().__init__(scope)

    def __call__(
        self, kv_cache: tuple[Any, ...], x: jax.Array, metadata: AttentionMetadata, *input_ids: jax.Array
    ) -> LayerOutput:
        if self.ngram_embeddings is None:
            return super().__call__(kv_cache, x, metadata)
        state, x = self.ngram_embeddings(kv_cache[0], x, metadata, *input_ids)
        caches, x = super().__call__(kv_cache[1:], x, metadata)
        return (state, *caches), x


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    layer_class = LongcatFlashNgramDecoderLayer
    renames = (
        *LongcatFlashForCausalLM.renames,
        ("model.ngram_embeddings.word_embeddings", "model.embed_tokens"),
        ("model.ngram_embeddings", "model.layers.0.ngram_embeddings"),
    )


_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}
FAMILY = Family(
    "LongCat-Flash, Flash-Lite",
    (LongcatFlashForCausalLM, LongcatFlashNgramForCausalLM),
    "two blocks of latent attention and two dense ones a layer, with experts by softmax beside them, of which some are "
    "the identity; in Lite, the mean with embeddings of hashed n-grams, whose tables stay in the file",
    names=dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), _NAMES),
    same_code={"longcat_flash_ngram": "longcat_flash"},
    tiny={"zero_expert_num": 3, "ngram_vocab_size_ratio": 0.5},
)
