"""Routers, experts and a whole sparse block; tests/models has the blocks of the families."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from jaxis.errors import CheckpointError, ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.experts import JaxExperts, StackLayout
from jaxis.layers.glu import GLU
from jaxis.layers.leaves import hash_router
from jaxis.layers.leaves import router as leaf_router
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import JaxRouter, Routing
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from tests.layers.layer_scopes import scope_of

X, E, F, T = 8, 12, 20, 23
PLAIN = {"dtype": jnp.float32, "quant_config": None, "prefix": ""}
CONCATENATED = StackLayout(transposed=False)

CONFIG = transformers.DeepseekV3Config(
    **{"hidden_size": E, "num_attention_heads": 2, "num_hidden_layers": 2, "num_experts_per_tok": 3},
    **{"n_routed_experts": X, "moe_intermediate_size": F, "n_shared_experts": 2, "norm_topk_prob": True},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
)
ROUTING = Routing(
    **{"num_experts": X, "num_experts_per_token": 3, "score_function": "sigmoid", "renormalize": True},
    **{"scaling_factor": 2.5, "float32_logits": True, "num_groups": 4, "num_allowed_groups": 2},
    group_score="top2_sum",
)
NAMES = CheckpointNames((("router", "gate"), ("shared_expert", "shared_experts")))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_sparse_block_equals_transformers_and_a_tokens_output_is_batch_invariant():
    theirs = modeling_deepseek_v3.DeepseekV3MoE(CONFIG).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(std=0.4)

    def make() -> SparseMoE:
        scope = scope_of({"hidden_size": E, "hidden_act": "silu"})
        shared = GatedMLP(scope / "shared", intermediate_size=2 * F)
        options = {"use_selection_bias": True, "stack_layout": CONCATENATED}
        return SparseMoE(scope, routing=ROUTING, intermediate_size=F, shared_experts=shared, **options)

    block = nnx.eval_shape(make)
    tensors = {NAMES.name_here(name): tensor.numpy() for name, tensor in theirs.state_dict().items()}
    assert JaxAutoWeightsLoader(block).load_weights(tensors.items()) == dict(block.named_parameters()).keys()
    ours, x = jax.jit(block), random(T, E)
    with torch.no_grad():
        expected = theirs(torch.tensor(x[None])).reshape(x.shape).numpy()
    together = ours(x)
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-5)
    for rows in (slice(3, 4), slice(5, 12)):
        np.testing.assert_allclose(ours(x[rows]), together[rows], rtol=0, atol=1e-5)
    # Whatever stands in padding rows, no token sees it.
    padded = np.concatenate([x, np.full((9, E), np.nan, np.float32)])
    np.testing.assert_allclose(ours(padded)[:T], together, rtol=0, atol=1e-5)


def test_choice_is_by_biased_scores_and_weights_are_the_scores():
    routing = Routing(num_experts=4, num_experts_per_token=2, score_function="sigmoid")
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    ids, weights = routing.choose(logits, jnp.asarray([0.0, 0.0, 0.0, 5.0]))
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, [[1 / (1 + np.e), 1 / (1 + np.exp(-2.0))]], rtol=1e-6)


@pytest.mark.parametrize("by_token_ids", [False, True])
def test_routers_with_the_root_of_softplus_equal_transformers(by_token_ids):
    config = transformers.DeepseekV4Config(
        vocab_size=40, hidden_size=E, n_routed_experts=X, num_experts_per_tok=3, routed_scaling_factor=1.5
    )
    router_class = (
        modeling_deepseek_v4.DeepseekV4HashRouter if by_token_ids else modeling_deepseek_v4.DeepseekV4TopKRouter
    )
    reference, generator = router_class(config), torch.Generator().manual_seed(0)
    tensors = {"weight": torch.randn(X, E, generator=generator)}
    if by_token_ids:
        tensors["tid2eid"] = torch.rand(40, X, generator=generator).argsort(dim=1)[:, :3]
    else:
        tensors["e_score_correction_bias"] = torch.randn(X, generator=generator)
    reference.load_state_dict(tensors)
    routing = Routing(
        num_experts=X, num_experts_per_token=3, score_function="sqrtsoftplus", renormalize=True, scaling_factor=1.5
    )
    scope = scope_of({"hidden_size": E, "vocab_size": 40})
    router = hash_router(scope, routing) if by_token_ids else leaf_router(scope, routing, use_selection_bias=True)
    JaxAutoWeightsLoader(router).load_weights((name, tensor.numpy()) for name, tensor in tensors.items())
    x, ids = random(T, E, seed=1), np.random.default_rng(2).integers(0, 40, T)
    of_tokens = [torch.tensor(ids)] if by_token_ids else []
    _, weights, experts = reference(torch.tensor(x), *of_tokens)
    found = router(jnp.asarray(x), *(jnp.asarray(each.numpy()) for each in of_tokens))
    order, expected = np.argsort(found[0], axis=1), np.argsort(experts.numpy(), axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(found[0], order, 1), np.take_along_axis(experts.numpy(), expected, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(found[1], order, 1), np.take_along_axis(weights.detach().numpy(), expected, 1), rtol=1e-5
    )


def test_logits_whose_scores_round_to_one_are_still_told_apart():
    routing = Routing(num_experts=4, num_experts_per_token=1, score_function="sigmoid")
    ids, weights = routing.choose(jnp.asarray([[30.0, 40.0, 50.0, 45.0]]))
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[1.0]])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"score_function": "relu"}, "score_function='relu' is not supported; known: softmax, sigmoid"),
        ({"group_score": "mean"}, "group_score='mean' is not supported"),
        ({"num_groups": 3}, "8 experts cannot be divided into 3 groups"),
        ({"num_groups": 2, "num_allowed_groups": 3}, "cannot come from 3 of 2 groups"),
        ({"num_groups": 4, "num_experts_per_token": 3}, "cannot have 3 experts of the 2 that it may choose from"),
        ({"num_experts_per_token": 9}, "cannot have 9 experts of the 8"),
        ({"num_groups": 8, "num_allowed_groups": 2, "group_score": "top2_sum"}, "groups of 1 expert have no best two"),
    ],
)
def test_routing_that_makes_no_sense_is_refused(settings, error):
    with pytest.raises(ConfigError, match=error):
        Routing(**{"num_experts": X, "num_experts_per_token": 2} | settings)


def abstract_experts(**options) -> JaxExperts:
    return nnx.eval_shape(lambda: JaxExperts(3, E, F, nnx.Rngs(0), gated_unit=GLU(jax.nn.silu), **options | PLAIN))


def per_expert_tensors(*names: str) -> dict[str, np.ndarray]:
    """`names` are the checkpoint's for gate, up and down."""
    shapes = ((F, E), (F, E), (E, F))
    return {
        f"{expert}.{name}.weight": random(*shape, seed=10 * expert + i)
        for expert in range(3)
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_load_one_by_one_in_any_order_and_in_several_runs(names):
    experts, tensors = abstract_experts(), per_expert_tensors(*names)
    pairs = list(tensors.items())
    np.random.default_rng(0).shuffle(pairs)
    for run in (pairs[:2], pairs[2:]):
        experts.load_weights(run)
    for ours, theirs in zip(("gate_proj", "up_proj", "down_proj"), names, strict=True):
        for expert in range(3):
            assert np.array_equal(getattr(experts, ours)[...][expert], tensors[f"{expert}.{theirs}.weight"])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_tensors_of_all_experts_are_taken_apart(transposed, interleaved):
    experts = abstract_experts(stack_layout=StackLayout(transposed, interleaved), use_bias=True)
    gate, up, down = random(3, F, E), random(3, F, E, seed=1), random(3, E, F, seed=2)
    biases = {"gate_proj_bias": random(3, F), "up_proj_bias": random(3, F, seed=1), "down_proj_bias": random(3, E)}

    def fuse(a, b):
        return np.stack([a, b], axis=2).reshape(3, 2 * F, *a.shape[2:]) if interleaved else np.concatenate([a, b], 1)

    gate_up = fuse(gate, up)
    tensors = {
        "gate_up_proj": np.swapaxes(gate_up, 1, 2) if transposed else gate_up,
        "down_proj": np.swapaxes(down, 1, 2) if transposed else down,
        "gate_up_proj_bias": fuse(biases["gate_proj_bias"], biases["up_proj_bias"]),
        "down_proj_bias": biases["down_proj_bias"],
    }
    assert experts.load_weights(tensors.items()) == dict(experts.named_parameters()).keys()
    for name, expected in ({"gate_proj": gate, "up_proj": up, "down_proj": down} | biases).items():
        assert np.array_equal(getattr(experts, name)[...], expected)


@pytest.mark.parametrize(
    ("name", "shape", "error"),
    [
        ("3.gate_proj.weight", (F, E), r"tensor '3.gate_proj.weight' \[20, 12\] is for expert 3, but the model has 3"),
        ("0.gate_proj.weight", (F, E), "is a duplicate for expert 0"),
        ("0.w1.weight", (F, E), "is a duplicate for expert 0"),
        ("1.up_proj.weight", (E, F), r"has \[12, 20\] for an expert in the checkpoint, \[20, 12\] in the model"),
        ("1.up_proj.scale", (1,), "has no parameter 'up_proj_scale' in JaxExperts"),
        ("1.up_proj.bias", (F,), "has no parameter 'up_proj_bias' in JaxExperts"),
        ("1.side_proj.weight", (F, E), "is not one of the tensors of JaxExperts"),
        ("gate_up_proj", (3, 2 * F, E), "is not one of the tensors of JaxExperts"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(name, shape, error):
    experts = abstract_experts()
    experts.load_weights([("0.gate_proj.weight", random(F, E))])
    with pytest.raises(CheckpointError, match=error):
        experts.load_weights([(name, random(*shape))])


@pytest.mark.parametrize(
    ("shape", "error"), [((4, 2 * F, E), "is for 4 experts, but the model has 3"), ((3, 7, E), "odd number of outputs")]
)
def test_tensors_of_all_experts_that_do_not_belong_are_refused(shape, error):
    with pytest.raises(CheckpointError, match=error):
        abstract_experts(stack_layout=CONCATENATED).load_weights([("gate_up_proj", random(*shape))])


def test_the_router_is_never_quantized():
    class Quantizing:
        def get_quant_method(self, layer, prefix):
            raise AssertionError(prefix)

    routing = Routing(num_experts=X, num_experts_per_token=2)
    JaxRouter(E, routing, nnx.Rngs(0), **PLAIN | {"quant_config": Quantizing()})
