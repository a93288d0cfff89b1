"""OLMo 2 against transformers, on a tiny random checkpoint: `pytest examples/external_model`."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from jaxis_olmo2 import Olmo2ForCausalLM
from transformers import Olmo2Config
from transformers import Olmo2ForCausalLM as Reference

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.model_loader import load_model
from jaxis.models.registry import register_model
from jaxis.parallel.mesh import make_mesh


def save_random_checkpoint(folder: Path) -> Reference:
    """A tiny model with random weights, norms included, saved as transformers saves it."""
    config = Olmo2Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    reference = Reference(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    reference.save_pretrained(folder)
    return reference


def test_logits_equal_transformers(tmp_path: Path) -> None:
    reference = save_random_checkpoint(tmp_path)
    register_model("Olmo2ForCausalLM", Olmo2ForCausalLM)
    config = VllmConfig(ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path)))
    model = load_model(config, make_mesh())
    tokens = np.random.default_rng(0).integers(0, 50, 40)
    _, hidden, _ = model(None, jnp.asarray(tokens), AttentionMetadata.for_whole_sequences([40]))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    np.testing.assert_allclose(model.compute_logits(hidden), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
