"""Code shared by families with latent attention to tokens that an indexer selects (DeepSeek Sparse Attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.indexer import Indexer, IndexerSizes
from jaxis.layers.scope import LayerScope
from jaxis.layers.sparse_mla import SparseLatentAttention
from jaxis.models.common.deepseek import (
    DeepseekCausalLM,
    DeepseekDecoderLayer,
    LatentAttentionSettings,
    deepseek_v3_routing,
)
from jaxis.models.common.family import TinySizes
from jaxis.models.common.sparse_layers import is_sparse_layer

_SCHEDULE_KEYS = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
_HAS_INDEXER = {"full": True, "shared": False, "F": True, "S": False}
_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")


class SparseLatentDecoderLayer(DeepseekDecoderLayer):
    """DeepSeek V3's layer with sparse latent attention.

    Args:
      interleaved_index_rope: True if the rope of the indexer pairs neighbouring dimensions.
      has_indexer: For each layer of the model, True if it has an indexer. A layer without one uses the selection of the
        last layer before it that has one. None: all layers have one.
    """

    def __init__(
        self, scope: LayerScope, *, interleaved_index_rope: bool, has_indexer: Sequence[bool] | None = None
    ) -> None:
        config = scope.config
        settings = LatentAttentionSettings.of(scope)
        indexer = None
        if has_indexer is None or has_indexer[scope.layer_index]:
            indexer = token_indexer(scope / "self_attn" / "indexer", settings, interleaved=interleaved_index_rope)
        self_attn = settings.make(
            SparseLatentAttention,
            scope / "self_attn",
            indexer=indexer,
            num_selected=config["index_topk"],
            hands_on_selection=has_indexer is not None and not all(has_indexer),
        )
        super().__init__(
            scope,
            routing=deepseek_v3_routing(config),
            is_sparse=is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=3),
            use_selection_bias=True,
            self_attn=self_attn,
        )


def token_indexer(
    scope: LayerScope, settings: LatentAttentionSettings, *, interleaved: bool, **options: Any
) -> Indexer:
    """An indexer with config.json's sizes, whose rope pairs neighbouring dimensions if `interleaved`.

    `options` are further arguments of `Indexer`. Raises ConfigError if the sizes are inconsistent.
    """
    config = scope.config
    sizes = IndexerSizes(
        num_heads=config["index_n_heads"],
        head_dim=config["index_head_dim"],
        num_selected=config["index_topk"],
        always=(config.get("index_init_tokens", 0), config.get("index_local_tokens", 0)),
    )
    if sum(sizes.always) > sizes.num_selected:
        raise config.fault("index_topk", "index_init_tokens", "index_local_tokens", why="which are more than the first")
    if sizes.head_dim < settings.sizes.qk_rope_head_dim:
        raise config.fault("index_head_dim", "qk_rope_head_dim", why="of which the rope cannot rotate the second")
    rope = settings.make_rope(interleaved=interleaved)
    return Indexer(scope, sizes, query_size=index_query_size(settings, config), rope=rope, **options)


def index_query_size(settings: LatentAttentionSettings, config: HFConfig) -> int:
    """Returns the size of the latent that an indexer's queries are projected from. Raises ConfigError without one."""
    size = settings.sizes.q_lora_rank
    if size is None:
        raise ConfigError(f"{config.source} has no q_lora_rank, from which the indexer's queries are projected")
    return size


def layers_with_indexer(config: HFConfig) -> list[bool]:
    """Returns for each layer whether it has an indexer: by a list, a pattern of letters, or a period.

    Raises ConfigError if the list or the pattern lacks a layer, or the first layer has no indexer.
    """
    num_layers: int = config["num_hidden_layers"]
    key = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    kinds = config.get(key)
    if kinds is None:
        frequency, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        return [max(i - offset + 1, 0) % max(frequency, 1) == 0 for i in range(num_layers)]
    config.ignore(*_SCHEDULE_KEYS, because=f"{key} says it of each layer")
    found = [_HAS_INDEXER.get(kind) for kind in kinds]
    if len(found) != num_layers or None in found or not found[0]:
        raise config.fault(key, why=f"expected 'full' or 'shared' for each of {num_layers} layers, and 'full' first")
    return [bool(each) for each in found]


class SparseLatentCausalLM(DeepseekCausalLM):
    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect_all(moe_layer_freq=1, rope_interleave=True)
        config.ignore("head_dim", because="the reference overwrites it with qk_rope_head_dim")
        config.ignore("mlp_bias", because="the reference's blocks have none, whatever it says")
        if unknown := set(config.get("layer_types", ())) - set(_LAYER_TYPES):
            known = " or ".join(map(repr, _LAYER_TYPES))
            raise config.fault("layer_types", why=f"with {min(map(repr, unknown))}, of which only {known} is supported")


# `Family.tiny` of an indexer. With this many heads no score is 0 in all of them; equal scores may select differently.
TINY_INDEXER: TinySizes = {"index_topk": 9, "index_n_heads": 18, "index_head_dim": 16}
