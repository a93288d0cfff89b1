"""DeepSeek V4.1: V4's attention with entries and selections that layers share, and tables of n-grams in two layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.index_selection.candidates import CandidateBlocks
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.compressed_attention import CompressedAttention, Compressor
from jaxis.layers.decoder_layer import LayerCache, StreamsDecoderLayer
from jaxis.layers.ngram_embedding import NgramEmbedding
from jaxis.layers.ngram_hash import NgramHash, TokenWindow
from jaxis.layers.ngram_injection import Engram
from jaxis.layers.scope import LayerScope
from jaxis.layers.shared_entries import SharedEntriesAttention, SharedEntryIndexer
from jaxis.layers.streams import HyperConnection, read_streams
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek_v4 import (
    RENAMES,
    attention_sizes,
    check_common_keys,
    experts,
    index_sizes,
    rotary_embedding,
    window_attention,
)
from jaxis.models.common.dspark import DSparkParts
from jaxis.models.common.family import Family
from jaxis.models.common.streams import StreamsModel, manifold_connection, num_streams
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.token_classes import TokenClasses

_SEED = 10_007

Streams = tuple[jax.Array, jax.Array]
"""Streams [T, S, E], and the factors float32 [T, S] by which the next block reads them."""


class DeepseekV41DecoderLayer(StreamsDecoderLayer):
    """A layer whose blocks read by the factors that the connection of the block before has computed."""

    attn_hc: HyperConnection
    ffn_hc: HyperConnection

    def __init__(self, scope: LayerScope) -> None:
        # Before the attention: their caches are in the order of the names.
        self.uses_token_ids = scope.layer_index in _engram_layers(scope.config)
        self.engram = _engram(scope / "engram") if self.uses_token_ids else None
        super().__init__(scope, self_attn=_attention(scope), mlp=experts(scope), make_connection=manifold_connection)

    def __call__(
        self, kv_cache: LayerCache, x: Streams, metadata: AttentionMetadata, *input_ids: jax.Array
    ) -> tuple[LayerCache, Streams]:
        """Takes and returns streams with their factors; a layer with n-grams also takes the ids i32 [T]."""
        assert self.input_layernorm is not None
        assert self.post_attention_layernorm is not None
        (streams, factors), of_ngrams = x, ()
        if self.engram is not None:
            of_engram, *others = kv_cache
            of_engram, streams = self.engram(of_engram, streams, metadata, *input_ids)
            of_ngrams, kv_cache = (of_engram,), tuple(others)
        next_factors, update = self.attn_hc.coefficients(streams)
        read = self.input_layernorm(read_streams(streams, factors))
        kv_cache, attended = self.mixer(kv_cache, read, metadata)
        streams = update.into(streams, attended)
        last_factors, update = self.ffn_hc.coefficients(streams)
        read = self.post_attention_layernorm(read_streams(streams, next_factors))
        x = update.into(streams, self.mlp(read, metadata)), last_factors
        return (*of_ngrams, *kv_cache) if of_ngrams else kv_cache, x


class DeepseekV41Model(StreamsModel):
    def first_input(self, x: jax.Array) -> Any:
        """Returns streams, of which the first block reads the first."""
        return super().first_input(x), jnp.zeros((len(x), self.num_streams), jnp.float32).at[:, 0].set(1)

    def last_output(self, x: Any) -> jax.Array:
        return read_streams(*x)

    def states_of(self, x: Any) -> jax.Array:
        return x[0]


class DeepseekV41ForConditionalGeneration(TextPart, CausalLM):
    """The text of a model that also sees; published files name it and the whole alike."""

    layer_class = DeepseekV41DecoderLayer
    prediction_modules = ("mtp.",)
    model_class = DeepseekV41Model
    renames = (
        ("engram.embed", "engram.ple_embedding.ngram_embedding"),
        ("indexer.wk", "indexer.k_proj"),
        *RENAMES,
    )
    text_renames = text_module_renames = other_names = ()
    text_model_types = ("deepseek_v41_text", "deepseek_v41")
    other_parts = ("vision", "aligner", "image_start", "image_end", "image_newline", "image_pad")
    other_keys = ("vision_config", "image_token_id")
    # A bias of the router for tokens of images.
    buffers = (*CausalLM.buffers, ".gate.bias_vl")
    unadaptable = ("wo_a",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_common_keys(config)
        _check_sources(config)

    @classmethod
    def prediction_names(cls, config: HFConfig) -> DSparkParts | None:
        """Returns DSpark's layers, which read what enters the attention of some layers."""
        if not config.get("dspark_block_size"):
            return None
        if set(config["dspark_target_layer_ids"]) & set(_engram_layers(config)):
            raise config.fault("dspark_target_layer_ids", "engram_layer_ids", why="expected different layers")
        return DSparkParts(config=config, reads_outputs=False)


def _attention(scope: LayerScope) -> CompressedAttention:
    config, own, index = scope.config, scope / "self_attn", scope.layer_index
    # Those behind the model's own draft.
    if index >= config["num_hidden_layers"] or not (ratio := config["compress_ratios"][index]):
        return window_attention(scope, norms_queries=False)
    rope, sizes = rotary_embedding(scope, "compress"), attention_sizes(config)
    makes_entries = index in config["kv_source_layer_ids"]
    shared: dict[str, Any] = {"group_size": ratio, "rope": rope}
    compressor = indexer = None
    if makes_entries:
        size, heads = sizes.head_dim, sizes.num_heads
        compressor = Compressor(own / "compressor", head_dim=size, num_heads=heads, has_position_bias=False, **shared)
    if index in config["index_source_layer_ids"]:
        indexer = SharedEntryIndexer(
            own / "indexer",
            index_sizes(config),
            query_size=sizes.q_lora_rank,
            entry_size=sizes.head_dim if makes_entries else None,
            blocks=_candidate_blocks(scope, ratio),
            **shared,
        )
    parts = {"compressor": compressor, "indexer": indexer}
    return SharedEntriesAttention(own, sizes, norms_queries=False, **parts, **shared)


def _candidate_blocks(scope: LayerScope, ratio: int) -> CandidateBlocks | None:
    """Returns None also if all groups of the longest context would be candidates."""
    config, source = scope.config, scope.config.get("candidate_source_layer_id", -1)
    if source < 0:
        return None
    blocks = CandidateBlocks(
        config["candidate_topk_blocks"], config["candidate_block_size"], are_chosen=scope.layer_index == source
    )
    if blocks.number * blocks.size < config["index_topk"]:
        raise config.fault("index_topk", "candidate_topk_blocks", why="expected candidates for as many entries")
    is_before, has_all = scope.layer_index < source, scope.max_model_len // ratio <= blocks.number * blocks.size
    return None if is_before or has_all else blocks


def _check_sources(config: HFConfig) -> None:
    """Raises ConfigError if a layer's entries, selection or candidates are not those of a layer before it."""
    ratios, makers = config["compress_ratios"], config["kv_source_layer_ids"]
    num_layers, source_ratio, indexers = config["num_hidden_layers"], 0, config["index_source_layer_ids"]
    if len(ratios) < num_layers:
        raise config.fault("compress_ratios", why=f"expected one for each of {num_layers} layers")
    for i, ratio in enumerate(ratios[:num_layers]):
        if i in makers:
            source_ratio = ratio
        if (i in makers and i not in indexers) or (ratio == 0 and i in indexers) or ratio not in (0, source_ratio):
            why = f"where layer {i}, of ratio {ratio}, does not fit its source, or a source does not select"
            raise config.fault("kv_source_layer_ids", why=why)
    if config.get("candidate_source_layer_id", -1) not in (-1, max(makers)):
        raise config.fault("candidate_source_layer_id", why="expected the last of kv_source_layer_ids, or -1")


def _engram_layers(config: HFConfig) -> list[int]:
    return config.get("engram_layer_ids") or []


def _engram(scope: LayerScope) -> Engram:
    config, layers = scope.config, _engram_layers(scope.config)
    number, num_ids = layers.index(scope.layer_index), config["vocab_size"]
    num_classes, filler = config["engram_compressed_vocab_size"], config["engram_pad_token_id"]
    # Odd numbers, whose products with classes fit in 63 bits.
    bound = max(1, (2**63 - 1) // num_classes // 2)
    random = np.random.default_rng(_SEED * scope.layer_index)
    multipliers = (random.integers(0, bound, config["engram_max_ngram_size"], dtype=np.int64) * 2 + 1).tolist()
    hashes = NgramHash.of_orders(multipliers, config["engram_n_heads"], config["engram_vocab_size"], number)
    num_rows = config["engram_num_embeddings"][number]
    if sum(hashes.moduli) > num_rows:
        raise config.fault("engram_num_embeddings", "engram_vocab_size", why="and n-grams have more rows than that")
    # As many classes as ids: each is its own.
    classes = TokenClasses(scope.vllm_config.model_config.model, num_ids, num_classes, filler)
    embedding = NgramEmbedding(
        scope / "ple_embedding",
        hashes,
        num_rows,
        config["engram_head_dim"],
        {},
        read_classes=None if num_classes == num_ids else classes,
    )
    embed_size = len(hashes.moduli) * config["engram_head_dim"]
    window = TokenWindow(len(multipliers), filler=filler)
    return Engram(scope, embedding, window, embed_size=embed_size, num_streams=num_streams(config))


FAMILY = Family(
    "DeepSeek V4.1",
    (DeepseekV41ForConditionalGeneration,),
    "as V4, with entries of 2 tokens or 1 and selections that layers share, candidates for later selections, and two "
    "tables of hashed n-grams that stay in the file; text only",
    formats=("fp8", "MXFP4"),
    other_names={"DeepseekV41ForCausalLM": DeepseekV41ForConditionalGeneration},
)
