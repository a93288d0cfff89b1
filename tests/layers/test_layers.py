"""Layers against torch's and transformers' modules with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

from jaxis.config.attention_span import AttentionSpan
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.linear import JaxEinsum, JaxLinear
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxLayerNorm, JaxRmsNorm
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from tests.layers.layer_scopes import scope_of

MLP_SIZES = {"hidden_size": 8, "intermediate_size": 12}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def copy_weights(torch_module: torch.nn.Module, layer: JaxModule) -> None:
    """Randomises the torch module and gives the layer the same weights, by name."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in torch_module.parameters():
            parameter.normal_(std=0.3)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in torch_module.named_parameters()}
    assert JaxAutoWeightsLoader(layer).load_weights(weights.items()) == dict(layer.named_parameters()).keys()


def assert_equal(ours: jax.Array, theirs: torch.Tensor) -> None:
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
def test_linear(use_bias):
    theirs, ours = torch.nn.Linear(7, 5, bias=use_bias), JaxLinear(7, 5, nnx.Rngs(0), use_bias=use_bias)
    copy_weights(theirs, ours)
    x = random(3, 2, 7)
    assert_equal(ours(x), theirs(torch.tensor(x)))


def test_einsum_with_a_bias():
    ours = JaxEinsum("te,nhe->tnh", (2, 3, 7), nnx.Rngs(0), bias_shape=(2, 3))
    theirs = torch.nn.Linear(7, 6)
    copy_weights(theirs, ours)
    x = random(4, 7)
    assert_equal(ours(x).reshape(4, 6), theirs(torch.tensor(x)))


def test_embeddings_and_tied_head():
    theirs, ours = torch.nn.Embedding(11, 4), JaxEmbed(11, 4, nnx.Rngs(0))
    copy_weights(theirs, ours)
    ids = np.array([0, 10, 3, 3])
    assert_equal(ours(ids), theirs(torch.tensor(ids)))
    x = random(5, 4)
    assert_equal(ours.decode(x), torch.tensor(x) @ theirs.weight.T)


def test_an_output_head_of_its_own():
    theirs, ours = torch.nn.Linear(4, 11, bias=False), JaxLmHead(4, 11, nnx.Rngs(0))
    copy_weights(theirs, ours)
    x = random(5, 4)
    assert_equal(ours(x), theirs(torch.tensor(x)))


def test_bfloat16_heads_give_float32_logits():
    x = jnp.asarray(random(5, 4), jnp.bfloat16)
    head = JaxLmHead(4, 11, nnx.Rngs(0), dtype=jnp.bfloat16)
    embed = JaxEmbed(11, 4, nnx.Rngs(0), dtype=jnp.bfloat16)
    embed.weight.set_value(head.weight[...])
    assert head(x).dtype == embed.decode(x).dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(head.weight[...], np.float64).T
    for logits in (head(x), embed.decode(x)):
        # Accumulated and returned in float32: only the operands are rounded.
        np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    theirs = modeling_llama.LlamaRMSNorm(16, eps=0.01)
    ours = JaxRmsNorm(16, nnx.Rngs(0), epsilon=0.01)
    copy_weights(theirs, ours)
    x = torch.tensor(random(3, 2, 16)).to(dtype)
    if dtype == torch.bfloat16:
        ours.weight.set_value(ours.weight[...].astype(jnp.bfloat16))
    expected = theirs.to(dtype)(x)
    result = ours(jnp.asarray(x.float().numpy(), jnp.float32 if dtype == torch.float32 else jnp.bfloat16))
    # In bfloat16, equal but for values on the edge between two roundings.
    np.testing.assert_allclose(
        np.asarray(result, np.float32),
        expected.detach().float(),
        rtol=0 if dtype == torch.float32 else 2**-7,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_a_unit_offset(dtype):
    theirs = modeling_gemma2.Gemma2RMSNorm(16, eps=0.01)
    ours = JaxRmsNorm(16, nnx.Rngs(0), epsilon=0.01, add_unit_offset=True)
    copy_weights(theirs, ours)
    if dtype == torch.bfloat16:
        ours.weight.set_value(ours.weight[...].astype(jnp.bfloat16))
    x = torch.tensor(random(3, 2, 16)).to(dtype)
    result = ours(jnp.asarray(x.float().numpy(), jnp.float32 if dtype == torch.float32 else jnp.bfloat16))
    np.testing.assert_allclose(
        np.asarray(result, np.float32),
        theirs.to(dtype)(x).detach().float(),
        # In bfloat16, equal but for values on the edge between two roundings.
        rtol=0 if dtype == torch.float32 else 2**-7,
        atol=1e-5,
    )


@pytest.mark.parametrize("use_bias", [True, False])
def test_layer_norm(use_bias):
    theirs = torch.nn.LayerNorm(16, eps=0.01, bias=use_bias)
    ours = JaxLayerNorm(16, nnx.Rngs(0), epsilon=0.01, use_bias=use_bias)
    copy_weights(theirs, ours)
    x = random(3, 2, 16)
    assert_equal(ours(x), theirs(torch.tensor(x)))


def test_layer_norm_with_weights_for_each_head():
    theirs = modeling_cohere.CohereLayerNorm((3, 16), eps=0.01)
    ours = JaxLayerNorm((3, 16), nnx.Rngs(0), epsilon=0.01, use_bias=False)
    copy_weights(theirs, ours)
    x = random(5, 3, 16)
    assert_equal(ours(x), theirs(torch.tensor(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_embeddings_round_as_the_references(dtype):
    theirs = modeling_gemma2.Gemma2TextScaledWordEmbedding(11, 24, 0, embed_scale=24**0.5)
    ours_dtype = jnp.float32 if dtype == torch.float32 else jnp.bfloat16
    ours = JaxEmbed(11, 24, nnx.Rngs(0), scale=24**0.5, dtype=ours_dtype)
    copy_weights(theirs, ours)
    ids = np.array([0, 10, 3, 3])
    np.testing.assert_array_equal(ours(ids).astype(np.float32), theirs.to(dtype)(torch.tensor(ids)).detach().float())


def test_packed_gated_mlp():
    config = Phi3Config(hidden_size=8, num_attention_heads=1, intermediate_size=12, pad_token_id=0)
    theirs = modeling_phi3.Phi3MLP(config)
    ours = GatedMLP(scope_of(MLP_SIZES), packed_gate_up=True)
    copy_weights(theirs, ours)
    x = random(6, 8)
    assert_equal(ours(x), theirs(torch.tensor(x)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gated_mlp(activation):
    config = LlamaConfig(
        hidden_size=8, num_attention_heads=1, intermediate_size=12, hidden_act=activation, mlp_bias=True
    )
    theirs = modeling_llama.LlamaMLP(config)
    ours = GatedMLP(scope_of(MLP_SIZES | {"hidden_act": activation}), use_bias=True)
    copy_weights(theirs, ours)
    x = random(6, 8)
    assert_equal(ours(x), theirs(torch.tensor(x)))


def test_an_unknown_activation_is_refused():
    with pytest.raises(ConfigError, match=r"hidden_act='softsign' in config.json is not supported"):
        activation_function("softsign")


def attention_pair(qk_norm: bool, window: int | None) -> tuple[torch.nn.Module, torch.nn.Module, GroupedQueryAttention]:
    """transformers' rope and attention modules, and ours with the same weights: H=4, K=2, D=8, E=16."""
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config_class, module = (Qwen3Config, modeling_qwen3) if qk_norm else (LlamaConfig, modeling_llama)
    config = config_class(**sizes, attention_bias=True, attn_implementation="eager")
    attention_class = getattr(module, "Qwen3Attention" if qk_norm else "LlamaAttention")
    rotary = getattr(module, "Qwen3RotaryEmbedding" if qk_norm else "LlamaRotaryEmbedding")(config)
    scope = scope_of({**sizes, "rms_norm_eps": 1e-6})
    ours = GroupedQueryAttention(scope, qkv_bias=True, o_bias=True, qk_norm=qk_norm, span=AttentionSpan(window))
    ours.rope = RotaryEmbedding(tuple(rotary.inv_freq.tolist()))
    theirs = attention_class(config, 0)
    copy_weights(theirs, ours)
    return rotary, theirs, ours


@pytest.mark.sampled(3)
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("window", [None, 4, 100])
def test_attention_over_whole_sequences(qk_norm, window):
    lengths = (7, 1, 12)
    rotary, theirs, ours = attention_pair(qk_norm, window)
    x = random(sum(lengths), 16)
    cache, out = nnx.jit(ours)(None, jnp.asarray(x), AttentionMetadata.for_whole_sequences(lengths))
    assert cache is None
    for length, end in zip(lengths, np.cumsum(lengths), strict=True):
        part, positions = torch.tensor(x[None, end - length : end]), torch.arange(length)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < (window or length))
        mask = torch.where(visible, 0.0, -torch.inf)[None, None]
        expected, _ = theirs(part, position_embeddings=rotary(part, positions[None]), attention_mask=mask)
        assert_equal(out[end - length : end], expected[0])


def test_gradients_through_attention_equal_torchs():
    rotary, theirs, ours = attention_pair(qk_norm=True, window=5)
    x, weights, length = random(9, 16), random(9, 16, seed=1), 9

    def loss(layer: GroupedQueryAttention, x: jax.Array) -> jax.Array:
        _, out = layer(None, x, AttentionMetadata.for_whole_sequences([length]))
        return jnp.sum(out * weights)

    value, (layer_gradient, x_gradient) = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(ours, jnp.asarray(x))
    x_torch, positions = torch.tensor(x[None], requires_grad=True), torch.arange(length)
    distance = positions[:, None] - positions
    mask = torch.where((distance >= 0) & (distance < 5), 0.0, -torch.inf)[None, None]
    out, _ = theirs(x_torch, position_embeddings=rotary(x_torch, positions[None]), attention_mask=mask)
    expected = (out[0] * torch.tensor(weights)).sum()
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(x_gradient, x_torch.grad[0], rtol=0, atol=1e-4)
    gradients = {".".join(path): variable.get_value() for path, variable in nnx.to_flat_state(layer_gradient)}
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=0, atol=1e-4, err_msg=name)
