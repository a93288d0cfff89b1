"""Code shared by Kimi Linear and Kimi K3: the choice of a layer's mixer, and what config.json may say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import SelfAttention
from jaxis.layers.mla import MultiHeadLatentAttention
from jaxis.layers.mlp import FeedForward
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import LatentAttentionSettings
from jaxis.models.common.kda_hybrid import (
    hybrid_routing,
    kimi_delta_attention,
    listed_as_linear,
)
from jaxis.models.common.mamba import ignore_rope
from jaxis.models.common.sparse_layers import dense_or_sparse, is_sparse_layer


def kimi_mixer(scope: LayerScope) -> SelfAttention:
    """Kimi Delta Attention or latent attention, by config.json's lists of layers.

    Raises ConfigError if the sizes are inconsistent, or `layer_types` has an unknown type.
    """
    config = scope.config
    # Files that transformers saves have no such object, but `layer_types` and sizes of other names.
    linear: HFConfig = config.get("linear_attn_config") or HFConfig({}, source=config.source)
    is_linear = listed_as_linear(config, scope.layer_index)
    if is_linear is None:
        is_linear = scope.layer_index + 1 in linear["kda_layers"]  # which counts from 1
    for key in ("kda_layers", "full_attn_layers"):
        linear.ignore(key, because="each list says what the other does, and layer_types what both do")
    if not is_linear:
        gate = OutputGate("g_proj") if config.get("mla_use_output_gate", False) else None
        return LatentAttentionSettings.with_rope(scope, None).make(MultiHeadLatentAttention, scope, output_gate=gate)
    return kimi_delta_attention(
        scope,
        num_heads=linear.get("num_heads", config.get("linear_num_heads", 32)),
        head_dim=linear.get("head_dim", config.get("linear_head_dim", 128)),
        conv_width=linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        lower_bound=linear.get("gate_lower_bound"),
        decay_names=("f_a_proj", "f_b_proj"),
        gate_names=("g_proj",) if linear.get("use_full_rank_gate", False) else ("g_a_proj", "g_b_proj"),
    )


def kimi_feed_forward(scope: LayerScope, **options: Any) -> FeedForward:
    """A dense block, or experts and one shared block; `options` are those of `dense_or_sparse`."""
    config = scope.config
    is_sparse = is_sparse_layer(config, scope.layer_index, default_first_sparse=1)
    num_shared: int = config["num_shared_experts"] if is_sparse else 0
    return dense_or_sparse(scope, hybrid_routing(config), is_sparse=is_sparse, num_shared_experts=num_shared, **options)


class KimiCausalLM(CausalLM):
    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Also renames the block of sparse layers, which alone has another name."""
        layers = range(config["num_hidden_layers"])
        sparse = [i for i in layers if is_sparse_layer(config, i, default_first_sparse=1)]
        return tuple((f"layers.{i}.block_sparse_moe", f"layers.{i}.mlp") for i in sparse)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        ignore_rope(config)
        config.expect_all(mla_use_nope=True, moe_router_activation_func="sigmoid", use_grouped_topk=True)
        config.expect("moe_layer_freq", 1)
        config.ignore("model_max_length", because="no layer has a rope")
        config.ignore("head_dim", because="latent attention and linear attention have sizes of their own")
