"""DeepSeek V4: entries compressed from groups of tokens beside a window, residual streams, experts by token ids.

Published config.json files and those that transformers writes have different keys; both are read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.layers.compressed_attention import (
    CompressedAttention,
    CompressedAttentionSizes,
    CompressedIndexer,
    Compressor,
)
from jaxis.layers.decoder_layer import StreamsDecoderLayer
from jaxis.layers.glu import LimitedGLU
from jaxis.layers.indexer import IndexerSizes
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.layers.streams import HyperMixer, StreamsNorm
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.streams import CONNECTION_RENAMES, StreamsModel, manifold_connection, num_streams

_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
_SPARSE, _HEAVY = 4, 128  # the published ratios


class DeepseekV4DecoderLayer(StreamsDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=_attention(scope), mlp=_experts(scope), make_connection=manifold_connection)


class DeepseekV4Model(StreamsModel):
    def __init__(self, scope: LayerScope, layer_class: Any, options: DecoderOptions) -> None:
        super().__init__(scope, layer_class, options)
        self.num_hashed = sum(_uses_token_ids(scope.config, i) for i in range(len(self.layers)))

    @property
    def has_layer_inputs(self) -> bool:
        return True

    def layer_inputs(self, input_ids: jax.Array, embeddings: jax.Array) -> Sequence[tuple[jax.Array, ...]]:
        """Returns the token ids for each layer that chooses experts by them."""
        del embeddings
        return [(input_ids,)] * self.num_hashed + [()] * (len(self.layers) - self.num_hashed)


class DeepseekV4ForCausalLM(CausalLM):
    layer_class = DeepseekV4DecoderLayer
    model_class = DeepseekV4Model
    renames = (
        ("embed", "model.embed_tokens"),
        ("head", "lm_head"),
        ("compressor.norm", "compressor.kv_norm"),
        ("norm", "model.norm"),
        ("layers", "model.layers"),
        ("hc_head_fn", "model.norm.mixer.fn.weight"),
        *((f"hc_head_{part}", f"model.norm.mixer.{part}") for part in ("base", "scale")),
        *CONNECTION_RENAMES,
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn", "self_attn"),
        ("ffn", "mlp"),
        ("wq_a", "q_a_proj"),
        ("q_norm", "q_a_norm"),
        ("wq_b", "q_b_proj"),
        ("wkv", "kv_proj"),
        ("wgate", "gate_proj"),
        ("ape", "position_bias"),
        ("wo_a", "o_a_proj"),
        ("wo_b", "o_b_proj"),
        ("attn_sink", "sinks"),
        ("gate.bias", "gate.e_score_correction_bias"),
        *(("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")),
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
        for key, *values in (
            ("num_key_value_heads", 1),
            ("norm_topk_prob", True),
            ("topk_method", "noaux_tc"),
            *(("n_group", None, 1), ("topk_group", None, 1)),
            *(("attention_bias", False), ("mlp_bias", False), ("rope_interleave", True), ("hidden_act", "silu")),
            ("qk_nope_head_dim", config["head_dim"] - _rotary_dim(config)),
        ):
            config.expect(key, *values)
        config.ignore("compress_rope_parameters", because="rope_parameters and compress_rope_theta say the same")
        config.ignore(
            "compress_rope_theta", because="rope_parameters of transformers' form say it of each kind of layer"
        )
        config.ignore("expert_dtype", because="the tensors of experts say it")
        for kind in ("main", "compress"):
            _rope(config, kind)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        mixer = HyperMixer(scope, num_streams(config), epsilon=config.get("hc_eps", 1e-6))
        return DecoderOptions(norm=StreamsNorm(scope, mixer), prediction_modules=("mtp.",))


def _attention(scope: LayerScope) -> CompressedAttention:
    config, own = scope.config, scope / "self_attn"
    ratio = _ratio(config, scope.layer_index)
    rope = make_rotary_embedding(
        _rope(config, "compress" if ratio else "main"),
        head_dim=_rotary_dim(config),
        max_model_len=scope.max_model_len,
        interleaved=True,
    )
    sizes = CompressedAttentionSizes(
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        q_lora_rank=config["q_lora_rank"],
        window=config["sliding_window"],
        output_groups=config["o_groups"],
        o_lora_rank=config["o_lora_rank"],
    )
    compressor = indexer = None
    if ratio:
        is_sparse = _kind(config, scope.layer_index) == _KINDS[1]
        compressor = Compressor(
            own / "compressor",
            head_dim=sizes.head_dim,
            num_heads=sizes.num_heads,
            group_size=ratio,
            overlaps=is_sparse,
            rope=rope,
        )
        index_sizes = IndexerSizes(config["index_n_heads"], config["index_head_dim"], config["index_topk"])
        if is_sparse:
            indexer = CompressedIndexer(
                own / "indexer", index_sizes, query_size=sizes.q_lora_rank, group_size=ratio, rope=rope
            )
    return CompressedAttention(own, sizes, rope=rope, compressor=compressor, indexer=indexer)


def _experts(scope: LayerScope) -> SparseMoE:
    config, mlp = scope.config, scope / "mlp"
    routing = Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        score_function=config["scoring_func"],
        renormalize=True,
        scaling_factor=config["routed_scaling_factor"],
        float32_logits=True,
    )
    unit, size = LimitedGLU(float(config["swiglu_limit"])), config["moe_intermediate_size"]
    by_ids = _uses_token_ids(config, scope.layer_index)
    return SparseMoE(
        mlp,
        routing=routing,
        intermediate_size=size,
        gated_unit=unit,
        use_selection_bias=not by_ids,
        use_token_ids=by_ids,
        shared_experts=GatedMLP(
            mlp / "shared_experts", intermediate_size=config["n_shared_experts"] * size, gated_unit=unit
        ),
    )


def _kind(config: HFConfig, layer_index: int) -> str:
    """Returns one of `_KINDS`. Raises ConfigError if config.json has another kind or ratio, or none for the layer."""
    kinds = config.get("layer_types")
    key, names = (
        ("layer_types", dict.fromkeys(_KINDS)) if kinds else ("compress_ratios", {0: "", _SPARSE: "", _HEAVY: ""})
    )
    listed = config[key]
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
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return layer_index < config.get("num_hash_layers", 3)
    config.ignore("num_hash_layers", because="mlp_layer_types names each layer's kind")
    if sorted(kinds) != kinds or not {"hash_moe", "moe"}.issuperset(kinds) or layer_index >= len(kinds):
        raise config.fault("mlp_layer_types", why="expected 'hash_moe' for the first layers and 'moe' for the others")
    return kinds[layer_index] == "hash_moe"


def _rotary_dim(config: HFConfig) -> int:
    share = config.get("partial_rotary_factor", 64 / 512)
    return config.get("qk_rope_head_dim", int(config["head_dim"] * share))


def _rope(config: HFConfig, kind: str) -> RopeConfig:
    """Returns the rope of layers with compressed entries ("compress"), or of windows alone ("main").

    Published files have one object, which is that of the first but for its base.
    """
    section = config.get("rope_parameters")
    theta = config.get("rope_theta", 10_000.0)
    if isinstance(section, HFConfig) and kind in section:
        rope = rope_config(config, kind)
    elif kind == "main":
        rope = RopeConfig(rope_type="default", theta=theta)
    else:
        rope = rope_config(config, theta=config.get("compress_rope_theta", 160_000.0))
    # The rope's scale of queries and keys is not used.
    return dataclasses.replace(rope, partial_rotary_factor=1.0, attention_factor=rope.attention_factor or 1.0)


def _tiny_kinds(twin: Mapping[str, Any]) -> list[int]:
    """Returns ratios of a tiny twin's layers, of each kind."""
    return [0, _SPARSE, _HEAVY, _SPARSE][: twin["num_hidden_layers"]]


FAMILY = Family(
    "DeepSeek V4",
    (DeepseekV4ForCausalLM,),
    "a window of 128 tokens, and entries compressed from 4 tokens, of which an indexer selects 512, or from 128; "
    "4 residual streams; 256 experts, in the first layers by token ids",
    formats=("fp8", "MXFP4"),
    tiny={"index_topk": 9, "index_n_heads": 18, "index_head_dim": 16, "o_groups": 2, "o_lora_rank": 16},
)
