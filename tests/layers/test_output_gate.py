"""Gates on attention's output, against the same attention without one and NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.output_gate import OutputGate
from tests.layers.layer_scopes import in_one_program, scope_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 48, 4, 2, 16, 19
CONFIG = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
}
GATES = {
    "in q_proj": OutputGate(),
    "per element": OutputGate("gate_proj"),
    "per head": OutputGate("g_proj", per_head=True),
    "per head, softplus": OutputGate("g_proj", per_head=True, activation="softplus"),
}


def run(layer: GroupedQueryAttention, x: np.ndarray) -> np.ndarray:
    return np.asarray(in_one_program(layer, None, jnp.asarray(x), AttentionMetadata.for_whole_sequences((TOKENS,)))[1])


def attended(layer: GroupedQueryAttention, q_weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[T, H, D]: what the layer's attention gives before gate and `o_proj`, with these query weights."""
    plain = GroupedQueryAttention(scope_of(CONFIG | {"hidden_size": HEADS * HEAD_DIM}), qk_norm=True)
    pad = ((0, 0), (0, HEADS * HEAD_DIM - HIDDEN))  # E as wide as the heads, so that o_proj can be the identity
    plain.q_proj.weight[...] = jnp.asarray(np.pad(q_weight, pad))
    for name in ("k_proj", "v_proj"):
        getattr(plain, name).weight[...] = jnp.pad(getattr(layer, name).weight[...], pad)
    plain.o_proj.weight[...] = jnp.eye(HEADS * HEAD_DIM)
    return run(plain, np.pad(x, pad)).reshape(TOKENS, HEADS, HEAD_DIM)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", GATES)
def test_the_output_is_multiplied_by_the_gate_before_o_proj(name):
    gate, rng = GATES[name], np.random.default_rng(0)
    layer = GroupedQueryAttention(scope_of(CONFIG), qk_norm=True, output_gate=gate)
    for _, parameter in layer.named_parameters():
        if parameter.shape != (HEAD_DIM,):  # norms stay at 1
            parameter[...] = jnp.asarray(rng.standard_normal(parameter.shape), jnp.float32)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    q_weight = np.asarray(layer.q_proj.weight[...])
    if gate.name is None:
        q_weight, gate_weight = (
            q_weight.reshape(HEADS, 2, HEAD_DIM, HIDDEN).transpose(1, 0, 2, 3).reshape(2, -1, HIDDEN)
        )
    else:
        gate_weight = np.asarray(getattr(layer, gate.name).weight[...])
    logits = (x @ gate_weight.T).reshape(TOKENS, HEADS, -1)
    factors = np.log1p(np.exp(logits)) if gate.activation == "softplus" else 1 / (1 + np.exp(-logits))
    gated = (attended(layer, q_weight, x) * factors).reshape(TOKENS, -1)
    np.testing.assert_allclose(run(layer, x), gated @ np.asarray(layer.o_proj.weight[...]).T, rtol=2e-5, atol=2e-4)


def test_a_gate_of_whole_heads_has_a_matrix_of_its_own():
    with pytest.raises(ValueError, match="give its name"):
        OutputGate(per_head=True)


def test_a_layer_may_have_other_numbers_of_heads_than_config_json():
    layer = GroupedQueryAttention(scope_of(CONFIG), num_heads=6, num_kv_heads=3)
    assert {name: value.shape for name, value in layer.named_parameters()} == {
        "q_proj.weight": (6 * HEAD_DIM, HIDDEN),
        "k_proj.weight": (3 * HEAD_DIM, HIDDEN),
        "v_proj.weight": (3 * HEAD_DIM, HIDDEN),
        "o_proj.weight": (HIDDEN, 6 * HEAD_DIM),
    }
    assert layer.kv_cache_spec.num_kv_heads == 3
