"""Made-up checkpoints are in the published layout: transformers and jaxis both load them."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from random_checkpoint import SHAPES, write_random_checkpoint

SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "sizes"), [("qwen3-0.6b", {}), ("qwen3-moe-1.5b", {"num_experts": 4, "moe_intermediate_size": 32})]
)
def test_both_load_it_and_compute_the_same(shape, sizes, tmp_path):
    write_random_checkpoint(tmp_path / "model", SHAPES[shape] | SMALL | sizes)
    folder = tmp_path / "model"
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", output_loading_info=True
    )
    assert not any(report.values())
    model_config = ModelConfig(str(folder), HFConfig.from_folder(folder), dtype=jnp.float32, max_model_len=64)
    ours = load_model(VllmConfig(model_config), make_mesh())
    ids = [1, 5, 63, 9]
    _, hidden, _ = ours(None, jnp.asarray(ids), AttentionMetadata.for_whole_sequences([len(ids)]))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(ours.compute_logits(hidden), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
