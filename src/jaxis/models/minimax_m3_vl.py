"""MiniMax M3: attention to blocks of tokens that an indexer selects for each key-value head, experts by sigmoid."""

from __future__ import annotations

from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.block_indexer import BlockIndexer
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.glu import ClampedGLU
from jaxis.layers.group_indexer import GroupIndexerSizes
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.layers.selected_attention import SelectedAttention
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import gemma_norm
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.minimax_m3 import MiniMaxM3Vision

_INDEX_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")
# The reference's keys -> the published ones, in an object of their own.
_INDEX_KEYS = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
}


def _published_index(config: HFConfig) -> HFConfig:
    published = config.get("sparse_attention_config")
    return published if isinstance(published, HFConfig) else HFConfig({})


def _is_sparse(
    scope: LayerScope, kinds: str, sparse: str, section: HFConfig, frequencies: str, *, default: bool
) -> bool:
    """True if the layer is sparse by the list `kinds`, or by the published list of 0 and 1 in a section.

    Raises ConfigError if there is not one entry per layer, or an unknown one.
    """
    config = scope.config
    known: set[Any] = {sparse, "dense" if sparse == "sparse" else "full_attention"}
    if config.get(kinds) is None:
        if section.get(frequencies) is None:
            return default
        config, kinds, known = section, frequencies, {0, 1}
    listed: list[Any] = config[kinds]
    if len(listed) != scope.config["num_hidden_layers"] or not known.issuperset(listed):
        raise config.fault(kinds, why=f"expected {' or '.join(sorted(map(repr, known)))} for each layer")
    return listed[scope.layer_index] in (sparse, 1)


def _indexer_sizes(config: HFConfig) -> GroupIndexerSizes:
    published = _published_index(config)
    values = {key: published.get(name, config.get(key, value)) for key, (name, value) in _INDEX_KEYS.items()}
    if values["index_n_heads"] != config["num_key_value_heads"]:
        heads = f"num_key_value_heads={config['num_key_value_heads']}"
        where = published if "sparse_num_index_heads" in published else config
        key = "sparse_num_index_heads" if where is published else "index_n_heads"
        raise where.fault(key, why=f"and {heads}, of which each needs a head of the indexer")
    return GroupIndexerSizes(
        num_heads=values["index_n_heads"],
        head_dim=values["index_head_dim"],
        group_size=values["index_block_size"],
        num_groups=values["index_topk_blocks"],
    )


class MiniMaxM3DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=self._attention(scope), mlp=self._mlp(scope))

    @classmethod
    def _attention(cls, scope: LayerScope) -> GroupedQueryAttention:
        config = scope.config
        head_dim: int = config.get("head_dim", 128)
        share = config.get("rotary_dim", 64) / head_dim
        rope = rope_config(config, default_theta=5_000_000.0, default_partial_rotary_factor=share)
        options: dict[str, Any] = {
            "head_dim": head_dim,
            "rope_settings": rope,
            "qk_norm": lambda _, head_dim: gemma_norm(scope, head_dim),
        }
        lists = ("layer_types", "minimax_m3_sparse", _published_index(config), "sparse_attention_freq")
        if not _is_sparse(scope, *lists, default=False):
            return GroupedQueryAttention(scope / "self_attn", **options)
        sizes = _indexer_sizes(config)
        return SelectedAttention(
            scope / "self_attn", make_indexer=lambda scope, rope: BlockIndexer(scope, sizes, rope=rope), **options
        )

    @classmethod
    def _mlp(cls, scope: LayerScope) -> FeedForward:
        config, mlp = scope.config, scope / "mlp"
        unit = ClampedGLU(config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702))
        if not _is_sparse(scope, "mlp_layer_types", "sparse", config, "moe_layer_freq", default=True):
            return GatedMLP(mlp, intermediate_size=config.get("dense_intermediate_size", 12288), gated_unit=unit)
        return SparseMoE(
            mlp,
            Routing.of(
                config,
                score_function="sigmoid",
                renormalize=True,
                scaling_factor=config.get("routed_scaling_factor", 2.0),
            ),
            intermediate_size=config["intermediate_size"],
            gated_unit=unit,
            shared_size=config.get("shared_intermediate_size", 3072),
            use_selection_bias=True,
        )


class MiniMaxM3SparseForCausalLM(CausalLM):
    layer_class = MiniMaxM3DecoderLayer
    make_norm = gemma_norm
    prediction_modules = ("mtp.", "model.mtp.")
    router_aux_loss_coef = 0.001
    renames = (
        # Dense layers' blocks are named `mlp` in files too.
        *((f"block_sparse_moe.{part}", f"mlp.{part}") for part in ("experts", "gate", "shared_experts")),
        ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        *((f"self_attn.index_{part}", f"self_attn.indexer.{part}") for part in _INDEX_PARTS),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head")
        config.expect("hidden_act", "swigluoai", "silu")
        config.expect_all(scoring_func="sigmoid", use_routing_bias=True, n_shared_experts=1)
        config.expect_all(attention_output_gate=False, index_local_blocks=1)
        sparse = _published_index(config)
        sparse.expect_all(use_sparse_attention=True, sparse_init_block=0, sparse_local_block=1, sparse_score_type="max")
        frequencies = sparse.get("sparse_attention_freq") or []
        without_values = sparse.get("sparse_disable_index_value") or frequencies
        if any(is_sparse and not off for is_sparse, off in zip(frequencies, without_values, strict=False)):
            raise sparse.fault("sparse_disable_index_value", why="with 0 for a sparse layer, which is not supported")
        for key in ("num_mtp_modules", "num_nextn_predict_layers", "mtp_transformer_layers"):
            config.ignore(key, because="layers that predict later tokens are not loaded")
        for key in ("dense_intermediate_size", "shared_intermediate_size", "intermediate_size", *_INDEX_KEYS):
            config.ignore(key, because="layers of another kind do not have it")


class MiniMaxM3SparseForConditionalGeneration(TextPart, MiniMaxM3SparseForCausalLM):
    tower = MiniMaxM3Vision
    text_model_types = ("minimax_m3_vl_text", "minimax_m3_text", "minimax_m3_vl")
    other_parts = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")
    other_keys = (
        *("projector_hidden_size", "projector_hidden_act", "image_seq_length", "process_image_mode"),
        *("merged_hidden_size", "multimodal_projector_bias", "vision_feature_layer", "img_token_compression_config"),
    )


FAMILY = Family(
    "MiniMax M3",
    (MiniMaxM3SparseForCausalLM, MiniMaxM3SparseForConditionalGeneration),
    "an indexer selects 16 blocks of 128 tokens for each key-value head; partial RoPE, norms on heads, 128 experts by "
    "sigmoid, a shared one",
    formats=("MXFP8",),
    gguf=("minimax-m3",),
    tiny={"index_block_size": 4, "index_topk_blocks": 3, "index_head_dim": 16},
)
