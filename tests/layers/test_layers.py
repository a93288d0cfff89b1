"""Layers against torch's and transformers' modules with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig, Qwen3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from jaxis.config.attention_span import AttentionSpan
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from tests.layers.layer_scopes import scope_of


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
def test_scaled_embeddings_round_as_the_references(dtype):
    theirs = modeling_gemma2.Gemma2TextScaledWordEmbedding(11, 24, 0, embed_scale=24**0.5)
    ours_dtype = jnp.float32 if dtype == torch.float32 else jnp.bfloat16
    ours = JaxEmbed(11, 24, nnx.Rngs(0), scale=24**0.5, dtype=ours_dtype)
    copy_weights(theirs, ours)
    ids = np.array([0, 10, 3, 3])
    np.testing.assert_array_equal(ours(ids).astype(np.float32), theirs.to(dtype)(torch.tensor(ids)).detach().float())


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
    ours = GroupedQueryAttention(scope, use_bias=True, qk_norm=qk_norm, span=AttentionSpan(window))
    ours.rope = RotaryEmbedding(tuple(rotary.inv_freq.tolist()))
    theirs = attention_class(config, 0)
    copy_weights(theirs, ours)
    return rotary, theirs, ours


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
