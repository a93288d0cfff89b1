"""Code shared by families with some dense feed-forward blocks and some mixtures of experts."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.weights import GatedUnit
from jaxis.layers.experts import StackLayout
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
    num_shared_experts: int,
    use_bias: bool = False,
    stack_layout: StackLayout | None = None,
    use_selection_bias: bool = True,
    expert_unit: GatedUnit | None = None,
    block_unit: GatedUnit | None = None,
) -> FeedForward:
    """A layer's `mlp` as in DeepSeek: a dense block, or experts and one shared block.

    The dense block has `intermediate_size`, each expert `moe_intermediate_size`. The shared block is as wide as all
    shared experts together; there may be 0. `use_bias` gives the dense and the shared block biases, and `block_unit` a
    gated unit; `expert_unit` is that of the experts. Other arguments are those of `SparseMoE`.
    """
    mlp = scope / "mlp"
    if not is_sparse:
        return GatedMLP(mlp, gated_unit=block_unit, use_bias=use_bias)
    expert_size: int = scope.config["moe_intermediate_size"]
    shared = None
    if num_shared_experts:
        shared_size = num_shared_experts * expert_size
        shared = GatedMLP(
            mlp / "shared_experts", intermediate_size=shared_size, gated_unit=block_unit, use_bias=use_bias
        )
    return SparseMoE(
        mlp,
        routing=routing,
        intermediate_size=expert_size,
        gated_unit=expert_unit,
        stack_layout=stack_layout,
        shared_experts=shared,
        use_selection_bias=use_selection_bias,
    )


def usual_sigmoid_routing(
    config: HFConfig, num_experts: int, *, default_factor: float, default_renormalize: bool = True
) -> Routing:
    """`sigmoid_routing` with DeepSeek V3's keys of the factor and of renormalizing, which may be absent."""
    return sigmoid_routing(
        config,
        num_experts,
        renormalize=config.get("norm_topk_prob", default_renormalize),
        scaling_factor=config.get("routed_scaling_factor", default_factor),
    )


def sigmoid_routing(config: HFConfig, num_experts: int, *, renormalize: bool, scaling_factor: float) -> Routing:
    """DeepSeek V3's routing of X experts with its keys of groups; the reference multiplies in float32.

    The other arguments are those of `Routing`. Raises ConfigError if config.json asks for another method.
    """
    config.expect("scoring_func", "sigmoid", "noaux_tc")
    config.expect("topk_method", "noaux_tc")
    return Routing(
        num_experts=num_experts,
        num_experts_per_token=config["num_experts_per_tok"],
        score_function="sigmoid",
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        num_groups=config.get("n_group", 1),
        num_allowed_groups=config.get("topk_group", 1),
        group_score="top2_sum",
        float32_logits=True,
    )
