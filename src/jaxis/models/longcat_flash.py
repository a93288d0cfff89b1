"""LongCat-Flash: two blocks of latent attention a layer and experts beside them. Lite adds n-grams; 2.0, an indexer."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, PreNormDecoderLayer
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mla import MultiHeadLatentAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.moe import SparseMoE
from jaxis.layers.ngram_mean import NgramMean
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.layers.sparse_mla import SparseLatentAttention
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import LatentAttentionSettings, latent_attention
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_latent import TINY_INDEXER, token_indexer


class LongcatFlashDecoderLayer(JaxModule):
    """`x = x + self_attn.0(norm(x)); y = norm(x); x = x + mlps.0(y)`
    `x = x + self_attn.1(norm(x)); x = x + mlps.1(norm(x)) + mlp(y)`, where mlp is a mixture of experts.

    The first layer's x is first the mean with embeddings of n-grams, if the model has them.
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
        # Its name comes before that of attention: their caches are in this order.
        self.ngram_embeddings = _ngrams(scope / "ngram_embeddings") if scope.layer_index == 0 else None
        self.uses_token_ids = self.ngram_embeddings is not None
        self.self_attn = [_attention(scope / "self_attn" / str(i), 2 * scope.layer_index + i) for i in range(2)]
        self.post_attention_layernorm = [rms_norm(scope) for _ in range(2)]
        self.mlps = [GatedMLP(scope / "mlps" / str(i)) for i in range(2)]
        self.mlp = SparseMoE(scope / "mlp", routing, use_selection_bias=True)

    def __call__(
        self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata, *input_ids: jax.Array
    ) -> LayerOutput:
        caches, begin = list(kv_cache), 0
        if self.ngram_embeddings is not None:
            begin = 1
            caches[0], x = self.ngram_embeddings(caches[0], x, metadata, *input_ids)
        begin, x = self._attend(0, begin, caches, x, metadata)
        normed = self.post_attention_layernorm[0](x)
        of_experts = self.mlp(normed, metadata)
        x = x + self.mlps[0](normed)
        _, x = self._attend(1, begin, caches, x, metadata)
        return tuple(caches), x + self.mlps[1](self.post_attention_layernorm[1](x)) + of_experts

    def _attend(
        self, i: int, begin: int, caches: list[LayerCache], x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[int, jax.Array]:
        """Runs attention i, whose caches begin at `begin`, and updates them; returns their end, and x."""
        attention, normed = self.self_attn[i], self.input_layernorm[i](x)
        end = begin + sum(isinstance(module, HasCache) for _, module in named_modules(attention))
        if isinstance(attention, SparseLatentAttention):
            # The selection, which the attentions share, is the last.
            of_attention, attended = attention((*caches[begin:end], caches[-1]), normed, metadata)
            *caches[begin:end], caches[-1] = of_attention
        else:
            caches[begin], attended = attention(caches[begin], normed, metadata)
        return end, x + attended


class LongcatPredictionLayer(PreNormDecoderLayer):
    """The layer that predicts later tokens, with its own indexer and a dense block."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=_attention(scope / "self_attn"), mlp=GatedMLP(scope / "mlp"))


def _ngrams(scope: LayerScope) -> NgramMean | None:
    config = scope.config
    if config.get("ngram_vocab_size_ratio") is None:
        return None
    end = config.get("eos_token_id", 2)
    return NgramMean(
        scope,
        order=config["emb_neighbor_num"],
        splits=config["emb_split_num"],
        base=int(config["ngram_vocab_size_ratio"] * config["vocab_size"]),
        end=end[0] if isinstance(end, list) else end,
    )


def _attention(scope: LayerScope, number: int | None = None) -> MultiHeadLatentAttention:
    """Makes the model's attention of this number, counting two a layer; None: that of the prediction layer."""
    config = scope.config
    if (num_selected := config.get("index_topk")) is None:
        attention = latent_attention(scope)
    else:
        settings, indexer = LatentAttentionSettings.of(scope), None
        if number is None or number % config.get("cli_factor", 2) == 0:
            interleaved = config.get("indexer_rope_interleave", True)
            indexer = token_indexer(scope / "indexer", settings, interleaved=interleaved, make_key_norm=rms_norm)
        attention = settings.make(
            SparseLatentAttention,
            scope,
            indexer=indexer,
            num_selected=num_selected,
            hands_on_selection=number is not None,
            latent_norm_epsilon=config["rms_norm_eps"],
        )
    sizes = attention.sizes
    # The reference multiplies queries, of which scores are linear.
    attention.scale *= (sizes.hidden_size / (sizes.q_lora_rank or sizes.hidden_size)) ** 0.5
    attention.latent_multiplier = (sizes.hidden_size / sizes.kv_lora_rank) ** 0.5
    return attention


class LongcatFlashForCausalLM(CausalLM):
    layer_class = LongcatFlashDecoderLayer
    default_prediction_layers = 1
    prediction_modules = ("model.mtp",)
    renames = (
        ("mlp.router.classifier", "mlp.gate"),
        ("mlp.router.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("model.ngram_embeddings.word_embeddings", "model.embed_tokens"),
        ("model.ngram_embeddings", "model.layers.0.ngram_embeddings"),
        ("transformer_layer.mlp", "mlp"),
    )
    other_names = (("enorm.m", "enorm"), ("hnorm.m", "hnorm"))
    unadaptable = ("mlp.router.classifier",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(zero_expert_type="identity", mla_scale_q_lora=True)
        config.expect_all(mla_scale_kv_lora=True, router_bias=False, norm_topk_prob=False)
        selects = config.get("index_topk") is not None
        config.expect("use_longcat_dsa", selects)
        config.ignore("head_dim", because="the sizes of latent attention say it")
        config.expect("attention_method", "MLA", *(["LSA"] if selects else []))
        config.expect("index_k_norm_type", "rms")
        config.expect("use_mla", True, False)
        config.ignore("dsa_mtp_cli", because="the prediction layer selects for each draft anew")
        config.expect_all(mtp_replicate_modules=True, mtp_disable_over_tokenizer=True, rounter_params_dtype="float32")
        config.ignore("moe_impl", "moe_switch_token_num", because="they choose among ways to compute the same sum")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        return PredictionNames.numbered(
            config,
            module="model.mtp",
            embedding_norm="layers.0.enorm",
            hidden_norm="layers.0.hnorm",
            projection="layers.0.eh_proj",
            norm="norm",
            layer="layers.0",
            shared=("embed_tokens",),
            layer_class=LongcatPredictionLayer,
        )


class LongcatFlashNgramForCausalLM(LongcatFlashForCausalLM):
    pass


class Longcat2ForCausalLM(LongcatFlashForCausalLM):
    """LongCat 2.0 and later models with an indexer; of files with this name, each part is made that its config has."""

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Also renames tables of n-grams, whose numbers are a part of their names."""
        num_tables = config.get("emb_split_num", 0) * (config.get("emb_neighbor_num", 1) - 1)
        ngrams = "model.layers.0.ngram_embeddings"
        tables = ((f"model.oe_embed_tokens{i}", f"{ngrams}.embedders.{i}") for i in range(num_tables))
        projections = ((f"model.oe_embed_proj{i}", f"{ngrams}.post_projs.{i}") for i in range(num_tables))
        return (*cls.renames, *tables, *projections)


_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}
_NAMES_2 = {
    **_NAMES,
    "oe_vocab_size_ratio": "ngram_vocab_size_ratio",
    "oe_neighbor_num": "emb_neighbor_num",
    "oe_split_num": "emb_split_num",
    "mtp_num_layers": "num_nextn_predict_layers",
}
FAMILY = Family(
    "LongCat-Flash, Flash-Lite, 2.0",
    (LongcatFlashForCausalLM, LongcatFlashNgramForCausalLM, Longcat2ForCausalLM),
    "two blocks of latent attention and two dense ones a layer, with experts by softmax beside them, of which some are "
    "the identity; in Lite and 2.0, the mean with embeddings of hashed n-grams, whose tables stay in the file; in 2.0, "
    "both attend to the first and last tokens and to others that the first one's indexer selects",
    names={
        **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), _NAMES),
        **dict.fromkeys(("longcat2", "LongcatCausalLM"), _NAMES_2),
    },
    same_code={
        **dict.fromkeys(("longcat_flash_ngram", "longcat2"), "longcat_flash"),
        **dict.fromkeys(("LongcatCausalLM", "Longcat2ForCausalLM"), "LongcatFlashForCausalLM"),
    },
    other_names={"LongcatCausalLM": Longcat2ForCausalLM},
    tiny={
        "zero_expert_num": 3,
        "ngram_vocab_size_ratio": 0.5,
        **TINY_INDEXER,
        "index_init_tokens": 2,
        "index_local_tokens": 3,
    },
)
