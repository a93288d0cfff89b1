"""Quantized checkpoints of a family with latent attention."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.support.quantized_models import IDS, load, logits
from tests.support.tiny_checkpoints import LATENT_SIZES, variant, write_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(A checkpoint with a prediction layer, the same quantized.)"""
    folder = tmp_path_factory.mktemp("deepseek")
    source = write_checkpoint(folder / "plain", "deepseek_v3", tokenizer=False, **LATENT_SIZES)
    tensors = load_file(source / "model.safetensors")
    extra = {name.replace("layers.1.", "layers.2."): x for name, x in tensors.items() if "layers.1." in name}
    predicting = variant(folder / "predicting", source, files={"model.safetensors": None}, num_nextn_predict_layers=1)
    save_file(tensors | extra, predicting / "model.safetensors")
    quantize_checkpoint(predicting, folder / "int8", parse_quantization("int8"))
    return predicting, folder / "int8"


def test_it_has_every_projection_of_the_model_quantized_and_no_prediction_layer(folders):
    names = load_file(folders[1] / "model.safetensors").keys()
    for projection in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        assert f"model.layers.1.self_attn.{projection}.weight_scale" in names
    assert not any("layers.2." in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_it_computes_what_the_same_weights_quantized_as_they_are_read_do(folders, native):
    expected = logits(load(folders[0], "int8", native=native), IDS)
    np.testing.assert_array_equal(logits(load(folders[1], native=native), IDS), expected)
