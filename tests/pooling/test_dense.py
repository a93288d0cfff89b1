"""sentence-transformers' Dense modules, and EmbeddingGemma, which has two, against transformers and torch."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jaxis import LLM
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels import native
from jaxis.pooling.dense import DenseLayers
from jaxis.pooling.pooling_config import read_dense
from tests.support.encoder_checkpoints import reference, save_model, save_pooling, texts

ACTIVATIONS = {
    "Identity": "torch.nn.modules.linear.Identity",
    "Tanh": "torch.nn.modules.activation.Tanh",
    "ReLU": "torch.nn.modules.activation.ReLU",
    "GELU": "torch.nn.modules.activation.GELU",
}


def save_dense(folder, sizes, activation="Identity", *, bias=False):
    """Dense layers of these sizes, one after the other, behind the pooling; returns them as torch computes them."""
    torch.manual_seed(1)
    layers = []
    for i, (size, next_size) in enumerate(itertools.pairwise(sizes)):
        linear = torch.nn.Linear(size, next_size, bias=bias)
        path = folder / f"{2 + i}_Dense"
        path.mkdir()
        save_file(
            {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}, path / "model.safetensors"
        )
        config = {"in_features": size, "out_features": next_size, "bias": bias}
        (path / "config.json").write_text(json.dumps({**config, "activation_function": ACTIVATIONS[activation]}))
        layers += [linear, getattr(torch.nn, activation)()]
    return torch.nn.Sequential(*layers).double()


def expected_vectors(model, dense, inputs, *, normalize=True):
    pooled = np.array([reference(model, token_ids, "mean", normalize=False) for token_ids in inputs])
    with torch.no_grad():
        vectors = dense(torch.tensor(pooled)).numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


def vectors(llm, prompts):
    return np.array([output.outputs.embedding for output in llm.embed(prompts)], np.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_torchs_and_a_row_does_not_depend_on_others(activation, tmp_path):
    dense = save_dense(tmp_path, (64, 48), activation, bias=activation != "ReLU")
    layers = DenseLayers([read_dense(tmp_path / "2_Dense")])
    x = np.random.default_rng(0).standard_normal((9, 64), np.float32)
    with torch.no_grad():
        expected = dense(torch.tensor(x).double()).numpy()
    together = np.asarray(jax.jit(layers)(x))
    np.testing.assert_allclose(together, expected, rtol=0, atol=1e-6)
    if native.usable():
        np.testing.assert_array_equal(jax.jit(layers)(x[4:5])[0], together[4])


def test_a_layer_on_an_encoders_mean_is_the_references(tmp_path):
    model = save_model(tmp_path)
    save_pooling(tmp_path, normalize=False, num_dense=1)
    dense = save_dense(tmp_path, (64, 48), "Tanh", bias=True)
    with LLM(tmp_path, show_progress=False) as llm:
        expected = expected_vectors(model, dense, texts(5), normalize=False)
        np.testing.assert_allclose(vectors(llm, texts(5)), expected, rtol=0, atol=1e-5)


def test_embedding_gemma_is_the_references(tmp_path):
    model = save_model(tmp_path, "Gemma3TextModel")
    save_pooling(tmp_path, num_dense=2, max_seq_length=64)
    dense = save_dense(tmp_path, (64, 256, 64))
    prompts = {"query": "w1 w2 ", "document": "w3 "}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    with LLM(tmp_path, show_progress=False, max_num_batched_tokens=256) as llm:
        together = vectors(llm, texts())
        np.testing.assert_allclose(together, expected_vectors(model, dense, texts()), rtol=0, atol=1e-5)
        [output] = llm.embed("w9", prompt_name="query")
        assert output.prompt_token_ids == [2, 6, 7, 14, 3]
        if native.usable():
            for number in (0, 23):
                np.testing.assert_array_equal(vectors(llm, texts()[number])[0], together[number])


def test_gemma_without_a_head_and_with_causal_attention(tmp_path):
    model = save_model(tmp_path, "Gemma3TextModel", use_bidirectional_attention=False)
    with LLM(tmp_path, show_progress=False) as llm:
        expected = [reference(model, token_ids, "mean") for token_ids in texts(2)]
        np.testing.assert_allclose(vectors(llm, texts(2)), expected, rtol=0, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"in_features": 32}, CheckpointError, "takes vectors of 32 elements and gets 64"),
        ({"out_features": 32}, CheckpointError, "has the tensors"),
        ({"bias": True}, CheckpointError, "linear.bias"),
        ({"activation_function": "my.Softplus"}, CheckpointError, "my.Softplus"),
        ({"module_input_name": "token_embeddings"}, ConfigError, "module_input_name"),
        ({"scale": 2}, CheckpointError, "has scale, which is not supported"),
    ],
)
def test_dense_layers_that_are_not_supported_are_refused(tmp_path, change, error, message):
    save_model(tmp_path)
    save_pooling(tmp_path, num_dense=1)
    save_dense(tmp_path, (64, 48))
    path = tmp_path / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=message):
        LLM(tmp_path, show_progress=False)


def test_dense_weights_in_a_pickle_are_refused(tmp_path):
    save_model(tmp_path)
    save_pooling(tmp_path, num_dense=1)
    save_dense(tmp_path, (64, 48))
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"2_Dense.*pytorch_model\.bin"):
        LLM(tmp_path, show_progress=False)
