"""Vectors of texts inside vLLM are those of jaxis.LLM, bit for bit."""

import os

import numpy as np
import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

import vllm
from vllm.exceptions import VLLMValidationError

import jaxis
from jaxis.engine.opened_model import EMBEDDED_MODEL
from tests.support.encoder_checkpoints import save_classifier, save_model, save_pooling, texts

ENGINE = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 96}


def vllm_vectors(llm, prompts, **params):
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.embed(prompts, pooling_params=vllm.PoolingParams(**params), use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def jaxis_vectors(folder, prompts):
    with jaxis.LLM(folder, runner="pooling", **ENGINE, show_progress=False) as llm:
        outputs = llm.embed([list(prompt) for prompt in prompts])
    return np.array([output.outputs.embedding for output in outputs], np.float32)


@pytest.mark.parametrize(
    ("family", "mode", "normalize"),
    [("BertModel", "mean", True), ("ModernBertModel", "cls", True), ("XLMRobertaModel", "mean", False)],
)
def test_encoders_make_the_same_vectors(tmp_path, family, mode, normalize):
    # Published configurations have the key, which vLLM reads.
    save_model(tmp_path, family, **({"position_embedding_type": "absolute"} if family == "XLMRobertaModel" else {}))
    save_pooling(tmp_path, mode, normalize=normalize)
    llm = vllm.LLM(str(tmp_path), **ENGINE)
    wanted = jaxis_vectors(tmp_path, texts(40))
    np.testing.assert_array_equal(vllm_vectors(llm, texts(40)), wanted)
    if normalize:
        with pytest.raises(VLLMValidationError, match="use_activation=False is not supported"):
            vllm_vectors(llm, texts(1), use_activation=False)
    else:
        lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(vllm_vectors(llm, texts(40), use_activation=True), wanted / lengths, rtol=1e-5)


def test_a_decoder_does_too():
    prompts = [np.random.default_rng(i).integers(5, 3000, 1 + 3 * i).tolist() for i in range(20)]
    llm = vllm.LLM(str(EMBEDDED_MODEL), runner="pooling", **ENGINE)
    wanted = jaxis_vectors(EMBEDDED_MODEL, prompts)
    np.testing.assert_array_equal(vllm_vectors(llm, prompts, use_activation=False), wanted)
    ones = vllm_vectors(llm, prompts)  # vLLM's default where the checkpoint says nothing
    np.testing.assert_allclose(ones, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), rtol=1e-5, atol=1e-7)


def test_fewer_elements_are_cut_from_the_vector(tmp_path):
    save_model(tmp_path)
    save_pooling(tmp_path)
    llm = vllm.LLM(str(tmp_path), **ENGINE, hf_overrides={"is_matryoshka": True})
    cut = jaxis_vectors(tmp_path, texts(10))[:, :16]
    wanted = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(vllm_vectors(llm, texts(10), dimensions=16), wanted, rtol=1e-5, atol=1e-7)


def test_classifiers_are_refused(tmp_path):
    save_classifier(tmp_path, "BertForSequenceClassification")
    with pytest.raises(ValueError, match=r"makes scores|convert='classify'"):
        vllm.LLM(str(tmp_path), **ENGINE)
