"""Rotary embeddings against transformers' modules, and against float64 where float32 runs out of digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.phi3 import modeling_phi3

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.errors import ConfigError
from jaxis.layers.rope import RotaryEmbedding, make_rotary_embedding

HEAD_DIM = 64
CONTEXT = 512
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.7 * i for i in range(32)],
    "original_max_position_embeddings": 128,
}
LONG_PARTIAL = {**LONG, "short_factor": LONG["short_factor"][:16], "long_factor": LONG["long_factor"][:16]}
KINDS = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn betas": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn attention factor": {**YARN, "attention_factor": 1.7},
    "yarn partial": {**YARN, "partial_rotary_factor": 0.25},
    "longrope": LONG,
    "longrope attention factor": {**LONG, "attention_factor": 1.2},
    "longrope partial": {**LONG_PARTIAL, "partial_rotary_factor": 0.5},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def reference_config(kind: str) -> LlamaConfig:
    return LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=CONTEXT, rope_parameters={"rope_theta": 10_000.0, **KINDS[kind]}
    )


def our_rope(kind: str, *, max_model_len: int = CONTEXT, interleaved: bool = False) -> RotaryEmbedding:
    config = HFConfig(reference_config(kind).to_dict())
    return make_rotary_embedding(
        rope_config(config), head_dim=HEAD_DIM, max_model_len=max_model_len, interleaved=interleaved
    )


def random_heads(length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((length, heads, HEAD_DIM)).astype(np.float32) for heads in (4, 2))


@pytest.mark.sampled(8)
@kinds
@pytest.mark.parametrize("length", [100, 1000])
def test_frequencies_scaling_and_rotated_heads_equal_transformers(kind, length):
    """100 tokens are within every kind's original context, 1000 beyond it."""
    q, k = random_heads(length)
    module = modeling_phi3.Phi3RotaryEmbedding(reference_config(kind))
    cos, sin = module(torch.tensor(q), torch.arange(length)[None])
    expected = modeling_phi3.apply_rotary_pos_emb(
        torch.tensor(q).transpose(0, 1)[None], torch.tensor(k).transpose(0, 1)[None], cos, sin
    )
    rope, lengths = our_rope(kind), jnp.full(length, length)
    frequencies = np.broadcast_to(rope.frequencies(lengths), (length, rope.rotary_dim // 2))
    np.testing.assert_allclose(frequencies[-1], module.inv_freq, rtol=1e-6)
    assert rope.attention_scaling == pytest.approx(module.attention_scaling, rel=1e-6)
    rotated = rope(q, k, jnp.arange(length), lengths)
    for ours, theirs in zip(rotated, expected, strict=True):
        np.testing.assert_allclose(ours, theirs[0].transpose(0, 1), rtol=0, atol=5e-4)


@pytest.mark.parametrize("kind", ["default", "yarn mscale"])
def test_interleaved_pairs_equal_transformers(kind):
    q, k = random_heads(50)
    module = modeling_cohere.CohereRotaryEmbedding(reference_config(kind))
    cos, sin = module(torch.tensor(q), torch.arange(50)[None])
    expected = modeling_cohere.apply_rotary_pos_emb(
        torch.tensor(q).transpose(0, 1)[None], torch.tensor(k).transpose(0, 1)[None], cos, sin
    )
    rotated = our_rope(kind, interleaved=True)(q, k, jnp.arange(50))
    for ours, theirs in zip(rotated, expected, strict=True):
        np.testing.assert_allclose(ours, theirs[0].transpose(0, 1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_angles_are_accurate_at_100k_tokens(kind):
    """Errors stay within those of float32 angles: half a unit in the last place of the angle and of the frequency."""
    rope, positions = our_rope(kind), np.array([0, 1, 1_000, 32_767, 65_535, 99_999])
    # The first half of the pairs is 1 and the second 0, so that rotating leaves the cosine and the sine.
    x = np.concatenate([np.ones(HEAD_DIM // 2), np.zeros(HEAD_DIM // 2)]).astype(np.float32)
    rotated, _ = jax.jit(rope)(*[np.broadcast_to(x, (len(positions), 1, HEAD_DIM))] * 2, jnp.asarray(positions))
    angles = positions[:, None] * np.asarray(rope.inv_freq, np.float64)
    exact = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1) * rope.attention_scaling
    tolerance = 1e-6 + np.tile(angles, 2) * np.finfo(np.float32).eps
    assert (np.abs(np.asarray(rotated)[:, 0] - exact) <= tolerance).all()


def test_a_turn_keeps_the_type_and_computes_in_float32():
    q, k = (x.astype(jnp.bfloat16) for x in random_heads(600))
    rope = our_rope("default")
    rotated, _ = rope(q, k, jnp.arange(600))
    assert rotated.dtype == jnp.bfloat16
    exact, _ = rope(q.astype(np.float32), k.astype(np.float32), jnp.arange(600))
    # One rounding, at the end.
    np.testing.assert_allclose(rotated.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


def test_dynamic_frequencies_depend_on_each_sequences_own_length():
    rope = our_rope("dynamic")
    frequencies = np.asarray(rope.frequencies(jnp.array([10, CONTEXT, CONTEXT + 1, 4 * CONTEXT])))
    np.testing.assert_allclose(frequencies[0], rope.inv_freq, rtol=1e-6)
    np.testing.assert_allclose(frequencies[1], rope.inv_freq, rtol=1e-6)
    assert (frequencies[2, 1:] < frequencies[1, 1:]).all()
    assert (frequencies[3, 1:] < frequencies[2, 1:]).all()


def test_a_paged_engine_uses_one_longrope_set_for_all_its_requests():
    short, long = our_rope("longrope", max_model_len=128), our_rope("longrope", max_model_len=129)
    np.testing.assert_allclose(short.frequencies(None)[0], short.inv_freq)
    np.testing.assert_allclose(long.frequencies(None)[0], long.long_inv_freq)


def test_longrope_factors_must_be_one_for_each_pair():
    config = rope_config(HFConfig({"rope_scaling": LONG_PARTIAL, "max_position_embeddings": CONTEXT}))
    with pytest.raises(ConfigError, match=r"short_factor in config.json has 16 entries, expected 32"):
        make_rotary_embedding(config, head_dim=HEAD_DIM, max_model_len=CONTEXT)
