"""Layers that predict later tokens draft what transformers drafts with them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.chain_checkpoints import (
    FORMATS,
    chain_reference,
    nemotron_reference,
    write_chain_checkpoint,
    write_nemotron_checkpoint,
)
from tests.support.parity import prompt
from tests.support.prediction_checkpoints import (
    WholeDrafts,
    family,
    reference_chain_drafts,
    reference_drafts,
    write_prediction_checkpoint,
)
from tests.support.stream_predictions import streams_reference, write_streams_checkpoint

# Largest difference of logits, as a part of the largest logit. The reference sums recurrences by chunks.
TOLERANCES = {"DeepSeek V3": 2e-5, "GLM-4.5 MoE": 2e-5, "GLM-4.5 MoE, groups, two dense layers": 2e-5, "Kimi K2": 2e-5}
TOLERANCES |= {"Mellum 2": 2e-5, "MiMo": 2e-5}
TOLERANCES |= {"DeepSeek V3.2": 2e-5, "GLM-5.2": 2e-5}
TOLERANCES |= {"Qwen3.5": 1e-4, "Qwen3.5 MoE": 1e-4, "Qwen3-Next": 1e-4}
# Qwen3.8's reference sums recurrences by chunks: beside float64, its model is nearer than the reference, too.
STREAMS = {"GLM-5.3-Flash": 1e-5, "DeepSeek V4": 1e-5, "Hy4": 1e-5, "Qwen3.8-Flash-Next": 2e-5}
QUICK = ("DeepSeek V3", "GLM-4.5 MoE", "Qwen3.5", "MiMo")
ROWS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TOLERANCES]
NUM_DRAFTS = 3


def load(folder, *, prediction_layer=True):
    model_config = ModelConfig(str(folder), HFConfig.from_folder(folder), max_model_len=1024)
    return load_model(VllmConfig(model_config, load_config=LoadConfig(prediction_layer=prediction_layer)), make_mesh())


@pytest.mark.sampled
@pytest.mark.parametrize("name", ROWS)
def test_drafts_are_those_of_transformers(tmp_path, name):
    folder, larger = write_prediction_checkpoint(tmp_path, family(name))
    drafts_of = WholeDrafts(load(folder))
    for length in (2, 17, 50):
        tokens = prompt(length)
        expected, expected_logits = reference_drafts(folder, larger, tokens, NUM_DRAFTS)
        drafts, logits = drafts_of(tokens, NUM_DRAFTS)
        assert drafts == expected
        np.testing.assert_allclose(
            logits, expected_logits, rtol=0, atol=TOLERANCES[name] * np.abs(expected_logits).max()
        )


@pytest.mark.sampled
@pytest.mark.parametrize("name", STREAMS)
def test_drafts_of_models_with_streams_are_those_of_transformers_blocks(tmp_path, name):
    drafts_of = WholeDrafts(load(write_streams_checkpoint(tmp_path, name)))
    for length in (2, 17, 50):
        drafts, logits = drafts_of(prompt(length), NUM_DRAFTS)
        expected, expected_logits = streams_reference(tmp_path, name, prompt(length), NUM_DRAFTS)
        assert drafts == expected
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=STREAMS[name] * np.abs(expected_logits).max())


def check_first_draft(found, expected):
    """The first of several layers makes all drafts: the first draft is that of programs that run each once."""
    ([draft], [logits]), (expected_drafts, expected_logits) = found, expected
    assert draft == expected_drafts[0]
    np.testing.assert_allclose(logits, expected_logits[0], rtol=0, atol=2e-5 * np.abs(expected_logits[0]).max())


def test_the_first_of_several_layers_drafts_as_in_transformers(tmp_path):
    folder, _ = write_prediction_checkpoint(tmp_path, family("GLM-4.5 MoE"), 3)
    drafts_of = WholeDrafts(load(folder))
    for length in (2, 17, 50):
        check_first_draft(drafts_of(prompt(length), 1), reference_chain_drafts(folder, prompt(length)))


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(FORMATS))
def test_the_first_of_several_layers_in_published_formats_drafts_as_in_sglang(tmp_path, name):
    folder = write_chain_checkpoint(tmp_path, name)
    drafts_of = WholeDrafts(load(folder))
    for length in (2, 17, 50):
        check_first_draft(drafts_of(prompt(length), 1), chain_reference(folder, name, prompt(length)))


@pytest.mark.slow
def test_a_block_of_two_layers_drafts_as_in_vllm(tmp_path):
    folder, larger = write_nemotron_checkpoint(tmp_path)
    drafts_of = WholeDrafts(load(folder))
    for length in (2, 17, 50):
        drafts, logits = drafts_of(prompt(length), 3)
        expected, expected_logits = nemotron_reference(folder, larger, prompt(length), 3)
        assert drafts == expected
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=2e-5 * np.abs(expected_logits).max())


def test_files_without_the_layers_are_refused_by_what_they_lack(tmp_path):
    folder, _ = write_prediction_checkpoint(tmp_path, family("GLM-4.5 MoE"))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"draft\.embedding_norm.* layers that predict later tokens: give files"):
        load(folder)
