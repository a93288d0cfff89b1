"""DeepSeek V4: entries compressed from groups of tokens beside a window, residual streams, experts by token ids.

Published config.json files and those that transformers writes have different keys; both are read here.
"""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.compressed_attention import CompressedAttention, CompressedIndexer, Compressor
from jaxis.layers.decoder_layer import StreamsDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek_v4 import (
    RENAMES,
    attention_sizes,
    check_common_keys,
    experts,
    index_sizes,
    rope_of,
    rotary_dim,
    rotary_embedding,
    window_attention,
)
from jaxis.models.common.dspark import DSparkParts
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import DraftParts, PredictionNames
from jaxis.models.common.streams import StreamsModel, last_mixer, manifold_connection, mixing_norm

_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
_SPARSE, _HEAVY = 4, 128  # the published ratios


class DeepseekV4DecoderLayer(StreamsDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        self.uses_token_ids = _uses_token_ids(scope.config, scope.layer_index)
        mlp = experts(scope, by_ids=self.uses_token_ids)
        super().__init__(scope, self_attn=_attention(scope), mlp=mlp, make_connection=manifold_connection)


class DeepseekV4ForCausalLM(CausalLM):
    layer_class = DeepseekV4DecoderLayer
    model_class = StreamsModel
    make_final_norm = mixing_norm
    default_prediction_layers = 1
    prediction_modules = ("mtp.",)
    renames = (
        *RENAMES,
        ("hc_head_fn", "model.norm.mixer.fn.weight"),
        *((f"hc_head_{part}", f"model.norm.mixer.{part}") for part in ("base", "scale")),
        ("ape", "position_bias"),
    )
    # Of checkpoints that transformers has saved.
    other_names = (
        *((f"model.hc_head.hc_{part}", f"hc_head_{part}") for part in ("fn", "base", "scale")),
        *(("model.layers", "layers"), ("model.norm", "norm"), ("attn.norm", "attn.kv_norm")),
    )
    module_renames = (
        ("compressor.indexer.scorer.weights_proj", "indexer.weights_proj"),
        ("compressor.indexer.q_b_proj", "indexer.q_b_proj"),
        ("compressor.indexer", "indexer.compressor"),
    )
    unadaptable = ("wo_a",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_common_keys(config)
        for key, *values in (
            *(("n_group", None, 1), ("topk_group", None, 1)),
            *(("mlp_bias", False), ("rope_interleave", True)),
            ("qk_nope_head_dim", config["head_dim"] - rotary_dim(config)),
        ):
            config.expect(key, *values)
        config.ignore("compress_rope_parameters", because="rope_parameters and compress_rope_theta say the same")
        config.ignore(
            "compress_rope_theta", because="rope_parameters of transformers' form say it of each kind of layer"
        )
        for kind in ("main", "compress"):
            rope_of(config, kind)

    @classmethod
    def prediction_names(cls, config: HFConfig) -> DraftParts | None:
        """Returns DSpark's layers, or the first prediction layer, with streams as `MTPBlock` in DeepSeek's code."""
        if config.get("dspark_block_size"):
            return DSparkParts(config=config, reads_outputs=True, make_mixer=last_mixer)
        return PredictionNames.numbered(
            config,
            module="mtp.0",
            projection="e_proj",
            hidden_projection="h_proj",
            norm="model.norm",
            shared=("emb", "lm_head"),
            layer_index=config["num_hidden_layers"],
            make_final_norm=mixing_norm,
            hands_on_normed=False,
        )


def _attention(scope: LayerScope) -> CompressedAttention:
    config, own = scope.config, scope / "self_attn"
    if not (ratio := _ratio(config, scope.layer_index)):
        return window_attention(scope)
    rope, sizes = rotary_embedding(scope, "compress"), attention_sizes(config)
    is_sparse, indexer = _kind(config, scope.layer_index) == _KINDS[1], None
    compressor = Compressor(
        own / "compressor",
        head_dim=sizes.head_dim,
        num_heads=sizes.num_heads,
        group_size=ratio,
        overlaps=is_sparse,
        rope=rope,
    )
    if is_sparse:
        indexer = CompressedIndexer(
            own / "indexer", index_sizes(config), query_size=sizes.q_lora_rank, group_size=ratio, rope=rope
        )
    return CompressedAttention(own, sizes, rope=rope, group_size=ratio, compressor=compressor, indexer=indexer)


def _kind(config: HFConfig, layer_index: int) -> str:
    """Returns one of `_KINDS`. Raises ConfigError if config.json has another kind or ratio, or none for the layer."""
    kinds = config.get("layer_types")
    key, names = (
        ("layer_types", dict.fromkeys(_KINDS)) if kinds else ("compress_ratios", {0: "", _SPARSE: "", _HEAVY: ""})
    )
    listed = config[key]
    if layer_index >= config["num_hidden_layers"]:
        return _KINDS[0]  # a layer that drafts
    if layer_index >= len(listed) or listed[layer_index] not in names:
        raise config.fault(key, why=f"expected one of {', '.join(map(str, names))} for each layer")
    return listed[layer_index] if kinds else _KINDS[list(names).index(listed[layer_index])]


def _ratio(config: HFConfig, layer_index: int) -> int:
    """Returns the tokens of a compressed entry; 0 for a layer without such entries."""
    kind = _kind(config, layer_index)
    rates = config.read_object("compress_rates") or {}
    return 0 if kind == _KINDS[0] else rates.get(kind, _SPARSE if kind == _KINDS[1] else _HEAVY)


def _uses_token_ids(config: HFConfig, layer_index: int) -> bool:
    """Returns whether the layer's experts are chosen by token ids; such layers come first."""
    if layer_index >= config["num_hidden_layers"]:
        return False  # a layer that drafts
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return layer_index < config.get("num_hash_layers", 3)
    config.ignore("num_hash_layers", because="mlp_layer_types names each layer's kind")
    if sorted(kinds) != kinds or not {"hash_moe", "moe"}.issuperset(kinds) or layer_index >= len(kinds):
        raise config.fault("mlp_layer_types", why="expected 'hash_moe' for the first layers and 'moe' for the others")
    return kinds[layer_index] == "hash_moe"


FAMILY = Family(
    "DeepSeek V4",
    (DeepseekV4ForCausalLM,),
    "a window of 128 tokens, and entries compressed from 4 tokens, of which an indexer selects 512, or from 128; "
    "4 residual streams; 256 experts, in the first layers by token ids",
    formats=("fp8", "MXFP4"),
    gguf=("deepseek4",),
    tiny={"index_topk": 9, "index_n_heads": 18, "index_head_dim": 16, "o_groups": 2, "o_lora_rank": 16},
)
