"""Qwen3.8-Flash-Next: the layers of Qwen3.5 between four residual streams, and a table of n-grams in one of them."""

from __future__ import annotations

from functools import partial

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import INDEXED_ATTENTION, LINEAR_ATTENTION
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, StreamsDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.gated_delta_net import GatedDeltaNet
from jaxis.layers.group_indexer import GroupIndexerSizes, MeanGroupIndexer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.ngram_embedding import NgramEmbedding
from jaxis.layers.ngram_hash import NgramHash, TokenWindow
from jaxis.layers.ngram_injection import NgramInjection
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope
from jaxis.layers.selected_attention import SelectedAttention
from jaxis.layers.streams import AllStreamsNorm, GatedConnection, GatedMixer
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.qwen_hybrid import (
    TINY_DELTA_NET,
    QwenHybridCausalLM,
    gated_attention,
    kind_of_layer,
    qwen_hybrid_moe,
)
from jaxis.models.common.streams import StreamsModel, num_streams
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.qwen import Qwen3_5Vision

_MASK = 2**64 - 1


class Qwen4ExpDecoderLayer(StreamsDecoderLayer):
    """A layer of the model, or the one that predicts later tokens: of attention, without n-grams."""

    def __init__(self, scope: LayerScope, *, predicts: bool = False) -> None:
        config = scope.config
        is_linear = not predicts and kind_of_layer(config, scope.layer_index, INDEXED_ATTENTION) == LINEAR_ATTENTION
        super().__init__(
            scope,
            self_attn=_delta_net(scope / "linear_attn") if is_linear else _attention(scope / "self_attn"),
            mlp=qwen_hybrid_moe(scope, renormalize=True, stack_layout=StackLayout(transposed=False)),
            make_connection=lambda scope: GatedConnection(scope, num_streams(config), config.get("hc_lowrank", 320)),
            make_norm=None,
            mixer_name="linear_attn" if is_linear else "self_attn",
        )
        ngram_layers = [] if predicts else _ngram_layers(config)
        # Its name comes after the mixer's: their caches are in this order.
        self.ple = None
        if scope.layer_index + 1 in ngram_layers:
            self.ple = _ngram_injection(scope / "ple", ngram_layers.index(scope.layer_index + 1))
        self.uses_token_ids = self.ple is not None

    def __call__(
        self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata, *input_ids: jax.Array
    ) -> LayerOutput:
        """x [T, S, E] -> the updated cache and [T, S, E]; a layer with n-grams also takes the ids i32 [T]."""
        if self.ple is None:
            return super().__call__(kv_cache, x, metadata)
        of_mixer, of_ngrams = kv_cache
        of_ngrams, added = self.ple(of_ngrams, x, metadata, *input_ids)
        of_mixer, x = super().__call__(of_mixer, x + added, metadata)
        return (of_mixer, of_ngrams), x


def _delta_net(scope: LayerScope) -> GatedDeltaNet:
    return GatedDeltaNet(scope, scope.config.get("output_gate_type") or scope.config.get("hidden_act", "silu"))


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    return gated_attention(scope, partial(SelectedAttention, make_indexer=_indexer))


def _indexer(scope: LayerScope, rope: RotaryEmbedding) -> MeanGroupIndexer:
    config = scope.config
    group_size: int = config["indexer_compress_ratio"]
    if config["indexer_budget"] % group_size:
        raise config.fault("indexer_budget", "indexer_compress_ratio", why="expected a multiple of the second")
    num_groups = config["indexer_budget"] // group_size
    sizes = GroupIndexerSizes(config["indexer_n_heads"], config["indexer_head_dim"], group_size, num_groups)
    return MeanGroupIndexer(scope, sizes, rope=rope)


def _mixer(scope: LayerScope) -> GatedMixer:
    return GatedMixer(scope, num_streams(scope.config), scope.config.get("hc_lowrank", 320))


class Qwen4ExpForCausalLM(QwenHybridCausalLM):
    layer_class = Qwen4ExpDecoderLayer
    model_class = StreamsModel
    make_final_norm = _mixer
    renames = (
        *QwenHybridCausalLM.renames,
        ("model.hyper_connection_mixer", "model.norm"),
        ("attn_hyper_connection", "attn_hc"),
        ("mlp_hyper_connection", "ffn_hc"),
    )
    router_aux_loss_coef = 0.001
    gate_types = (*QwenHybridCausalLM.gate_types, "sigmoid")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect_all(norm_topk_prob=True, indexer_kv_heads=1)
        config.ignore("split_ngram_parts", because="files say how many parts a table has")
        config.ignore("ple_embedding_dtype", because="tensors of the table say it")
        config.ignore("intermediate_size", because="every layer has experts")
        config.ignore("number_of_conv_states", because="it follows from the other keys")
        config.ignore("mtp", because="layers that draft tokens do not change logits")

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        """Returns the prediction layer, with streams as `Qwen4ExpMTP` in vLLM."""
        return PredictionNames.separate(
            config["num_hidden_layers"],
            make_norm=partial(rms_norm, add_unit_offset=True),
            projection="fc_embedding",
            hidden_projection="fc_hidden",
            norm="hyper_connection_mixer",
            layer_class=partial(Qwen4ExpDecoderLayer, predicts=True),
            make_hidden_norm=lambda scope: AllStreamsNorm(scope, num_streams(config)),
            make_final_norm=_mixer,
            hands_on_normed=False,
        )


def _ngram_layers(config: HFConfig) -> list[int]:
    """Returns the layers, counted from 1, that have a table of n-grams."""
    return sorted(set(config.get("ple_layer_ids") or ()))


def _ngram_injection(scope: LayerScope, number: int) -> NgramInjection:
    """Creates the n-grams of the layer that is the `number`-th, from 0, to have any."""
    config = scope.config
    order, heads_per_order = config.get("ngram_size", 3), config.get("heads_per_ngram", 8)
    embed_size = config.get("ple_embed_dim") or config["hidden_size"]
    end = config["eos_token_id"]
    end = end[0] if isinstance(end, list) else end
    multipliers = _multipliers(config, order, number)
    hashes = NgramHash.of_orders(multipliers, heads_per_order, config.get("ngram_vocab_size_base", 20_000_000), number)
    stored = {
        "layer_multipliers": multipliers,
        "ngram_heads_vocab_sizes": hashes.moduli,
        "ngram_heads_offsets": hashes.offsets,
    }
    padding = config.get("make_ngram_vocab_size_divisible_by", 128)
    num_rows = -(-sum(hashes.moduli) // padding) * padding
    width = embed_size // len(hashes.moduli)
    embedding = NgramEmbedding(scope / "ple_embedding", hashes, num_rows, width, stored)
    window = TokenWindow(order, filler=end, ends=end)
    return NgramInjection(scope, embedding, window, embed_size=embed_size, num_streams=num_streams(config))


def _multipliers(config: HFConfig, order: int, number: int) -> tuple[int, ...]:
    """Returns odd numbers from a sequence of random ones (SplitMix64), whose products with ids fit in 63 bits."""
    bound = max(1, (2**63 - 1) // config["vocab_size"] // 2)
    seed, step = config.get("seed", 1234) + 10_007 * number, 0x9E3779B97F4A7C15

    def draw(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        return value ^ value >> 31

    return tuple(2 * (draw(seed + step * (i + 2) & _MASK) % bound) + 1 for i in range(order))


class Qwen4ExpForConditionalGeneration(InnerTextPart, Qwen4ExpForCausalLM):
    tower = Qwen3_5Vision
    text_model_types = ("qwen4_exp_text", "qwen3_8_flash_next_text")


FAMILY = Family(
    "Qwen3.8-Flash-Next",
    (Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration),
    "as Qwen3.5 MoE, with four residual streams a token, a table of hashed n-grams that stays in the file, and "
    "attention to the best blocks of four tokens; Qwen's tower, M-RoPE",
    other_names={
        "Qwen3_8FlashNextForCausalLM": Qwen4ExpForCausalLM,
        "Qwen3_8FlashNextForConditionalGeneration": Qwen4ExpForConditionalGeneration,
    },
    formats=("fp8",),
    gguf=("qwen4exp",),
    tiny=TINY_DELTA_NET,
)
