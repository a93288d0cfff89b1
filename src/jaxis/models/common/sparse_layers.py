"""Code shared by families with some dense feed-forward blocks and some mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.weights import GatedUnit
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope

_NUM_DENSE = "first_k_dense_replace"


def num_dense_layers(config: HFConfig, default: int | None = None) -> int:
    """Returns the number of dense layers before the sparse ones; None as default means that config.json must say it."""
    return config[_NUM_DENSE] if default is None else config.get(_NUM_DENSE, default)


def expect_no_dense_layers(config: HFConfig) -> None:
    """Raises ConfigError if config.json has dense layers, for families whose layers are all sparse."""
    config.expect(_NUM_DENSE, 0)


def is_sparse_layer(config: HFConfig, layer_index: int, *, default_first_sparse: int) -> bool:
    """True if the layer, from 0, is sparse by `mlp_layer_types` or, without it, by `num_dense_layers`.

    Raises ConfigError if `mlp_layer_types` has an unknown type, or not one entry per layer.
    """
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return layer_index >= num_dense_layers(config, default_first_sparse)
    config.ignore(_NUM_DENSE, because="mlp_layer_types names each layer's kind")
    if len(kinds) != config["num_hidden_layers"] or not {"dense", "sparse"}.issuperset(kinds):
        raise config.fault("mlp_layer_types", why="expected 'dense' or 'sparse' for each layer")
    return kinds[layer_index] == "sparse"


def ignore_sizes_of_other_layers(config: HFConfig) -> None:
    """Declares keys that only dense or only sparse layers read, since a model may lack one of the two."""
    config.ignore("intermediate_size", because="sparse layers do not have it")
    for key in ("moe_intermediate_size", "n_shared_experts", "num_shared_experts", _NUM_DENSE):
        config.ignore(key, because="dense layers do not have it")


def dense_or_sparse(
    scope: LayerScope,
    routing: Routing,
    *,
    is_sparse: bool,
    num_shared_experts: int = 0,
    shared_size: int | None = None,
    use_bias: bool = False,
    block_unit: GatedUnit | None = None,
    **options: Any,
) -> FeedForward:
    """A layer's `mlp` as in DeepSeek: a dense block, or experts and one shared block.

    The shared block has `shared_size`, or else is as wide as all shared experts together; there may be 0. `use_bias`
    gives the dense and the shared block biases, and `block_unit` a gated unit. `options` are those of `SparseMoE`,
    which has a selection bias unless they say otherwise.
    """
    config, mlp = scope.config, scope / "mlp"
    ignore_sizes_of_other_layers(config)
    make_block = partial(GatedMLP, gated_unit=block_unit, use_bias=use_bias)
    if not is_sparse:
        return make_block(mlp)
    if shared_size is None:
        shared_size = num_shared_experts * config["moe_intermediate_size"]
    shared = make_block(mlp / "shared_experts", intermediate_size=shared_size) if shared_size else None
    return SparseMoE(mlp, routing, shared_experts=shared, **{"use_selection_bias": True, **options})


def sigmoid_routing(config: HFConfig, default_factor: float = 1.0, **settings: Any) -> Routing:
    """DeepSeek V3's routing with its keys, of which those of groups, factor and renormalizing may be absent.

    `settings` are attributes of `Routing` that these keys do not say. The reference multiplies in float32. Raises
    ConfigError if config.json asks for another method.
    """
    config.expect("scoring_func", "sigmoid", "noaux_tc")
    config.expect("topk_method", "noaux_tc")
    keys = {
        "renormalize": ("norm_topk_prob", True),
        "scaling_factor": ("routed_scaling_factor", default_factor),
        "num_groups": ("n_group", 1),
        "num_allowed_groups": ("topk_group", 1),
    }
    said = {name: config.get(*key) for name, key in keys.items() if name not in settings} | settings
    return Routing.of(config, score_function="sigmoid", group_score="top2_sum", float32_logits=True, **said)
