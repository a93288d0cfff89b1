"""A model's number of parameters is that of transformers, however its weights are stored."""

import jax.numpy as jnp
import pytest
import transformers

from jaxis.engine.execution.model_size import model_size
from jaxis.kernels import native
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import PackingConfig
from tests.support.tiny_checkpoints import LATENT_SIZES, write_checkpoint
from tests.support.tiny_models import load

needs_kernels = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture of experts with a tied head."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": True}
    return write_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe", tokenizer=False, **sizes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "dtype", "stored"),
    [
        (None, jnp.float32, "float32"),
        (None, jnp.bfloat16, "bfloat16"),
        (parse_quantization("int8"), jnp.float32, "int8"),
        pytest.param(PackingConfig(), jnp.bfloat16, "bfloat16", marks=needs_kernels),
        pytest.param(PackingConfig(parse_quantization("int8")), jnp.float32, "int8", marks=needs_kernels),
        pytest.param(PackingConfig(parse_quantization("int4")), jnp.float32, "int4", marks=needs_kernels),
    ],
)
def test_parameters_count_once_however_they_are_stored(folder, config, dtype, stored):
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model_size(load(folder, dtype=dtype, quant_config=config)) == (reference.num_parameters(), stored)


@needs_kernels
def test_latent_attention_that_is_packed_head_by_head_counts(tmp_path):
    folder = write_checkpoint(tmp_path, "deepseek_v3", tokenizer=False, **LATENT_SIZES | {"first_k_dense_replace": 2})
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model_size(load(folder, dtype=jnp.float32, quant_config=PackingConfig()))[0] == reference.num_parameters()
