"""Vectors and scores of texts inside vLLM are those of jaxis.LLM, bit for bit."""

import os
import shutil

import httpx
import numpy as np
import pytest
import torch

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

import vllm
from vllm.exceptions import VLLMValidationError

import jaxis
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ConfigError
from tests.integrations.vllm.vllm_server import vllm_server
from tests.pooling.test_token_rerankers import OVERRIDES, PREFIX, SUFFIX, TASK
from tests.pooling.test_token_rerankers import checkpoint as qwen3_reranker  # noqa: F401
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


@pytest.mark.parametrize(
    ("family", "num_labels"),
    [
        *(("BertForSequenceClassification", 1), ("ModernBertForSequenceClassification", 3)),
        *(("NomicBertForSequenceClassification", 3), ("Qwen3ForSequenceClassification", 1)),
        *(("Gemma3TextForSequenceClassification", 3), ("GPT2ForSequenceClassification", 1)),
    ],
)
def test_classifiers_make_the_same_scores(tmp_path, family, num_labels):
    model = save_classifier(tmp_path, family, num_labels=num_labels)
    llm = vllm.LLM(str(tmp_path), **ENGINE)
    prompts = [list(prompt) for prompt in texts(40)]
    for arguments in ({}, {"use_activation": False}):
        found = vllm_classes(llm, prompts, **arguments)
        np.testing.assert_array_equal(found, jaxis_classes(tmp_path, prompts, **arguments))
    with torch.no_grad():
        logits = np.array([model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts])
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def vllm_classes(llm, prompts, **params):
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.classify(prompts, pooling_params=vllm.PoolingParams(**params), use_tqdm=False)
    return np.array([output.outputs.probs for output in outputs], np.float32)


def jaxis_classes(folder, prompts, **arguments):
    with jaxis.LLM(folder, **ENGINE, show_progress=False) as llm:
        outputs = llm.classify(prompts, **arguments)
    return np.array([output.outputs.probs for output in outputs], np.float32)


@pytest.mark.parametrize("family", ["BertForSequenceClassification", "XLMRobertaForSequenceClassification"])
def test_rerankers_score_pairs_the_same(tmp_path, family):
    save_classifier(tmp_path, family, num_labels=1)
    documents = [" ".join(f"w{token_id - 5}" for token_id in ids[1:40]) for ids in texts(30)]
    with jaxis.LLM(tmp_path, **ENGINE, show_progress=False) as llm:
        wanted = llm.score("w1 w2 w3", documents)
        other = llm.score(["w1 w2 w3"] * 30, documents, use_activation=False)
    llm = vllm.LLM(str(tmp_path), **ENGINE)
    check_scores(llm.score("w1 w2 w3", documents, use_tqdm=False), wanted)
    params = vllm.PoolingParams(use_activation=False)
    check_scores(llm.score(["w1 w2 w3"] * 30, documents, pooling_params=params, use_tqdm=False), other)
    with pytest.raises(ValueError, match="embed"):
        llm.embed("w1", use_tqdm=False)


def check_scores(found, wanted):
    assert [each.prompt_token_ids for each in found] == [each.prompt_token_ids for each in wanted]
    assert [np.float32(each.outputs.score) for each in found] == [np.float32(each.outputs.score) for each in wanted]


def test_qwen3_rerankers_score_what_their_template_makes_of_pairs(qwen3_reranker, tmp_path):  # noqa: F811
    folder = str(shutil.copytree(qwen3_reranker[0], tmp_path / "model"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    documents = ["c b a", "d", "e f g h a b c d e f g h"]
    engine = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 128}
    with jaxis.LLM(folder, hf_overrides=OVERRIDES, **engine, show_progress=False) as llm:
        wanted = llm.score("a b c", documents)
    template = (
        f"{PREFIX}<Instruct>: {TASK}\n<Query>: {{{{ messages[0]['content'] }}}}\n"
        f"<Document>: {{{{ messages[1]['content'] }}}}{SUFFIX}"
    )
    llm = vllm.LLM(folder, runner="pooling", hf_overrides=OVERRIDES, **engine)
    check_scores(llm.score("a b c", documents, chat_template=template, use_tqdm=False), wanted)


def test_a_checkpoint_without_a_classifiers_head_is_not_made_one():
    with pytest.raises(ConfigError, match="convert='classify' needs a checkpoint with a classifier's head"):
        vllm.LLM(str(EMBEDDED_MODEL), runner="pooling", convert="classify", **ENGINE)


def test_a_server_has_the_routes_of_rerankers_and_classifiers(tmp_path):
    save_classifier(tmp_path, num_labels=1)
    documents = ["w7 w8 w9 w10", "w3 w2", "w1 w2 w3 w4 w5 w6"]
    with jaxis.LLM(tmp_path, **ENGINE, show_progress=False) as llm:
        scores = [each.outputs.score for each in llm.score("w1 w2", documents)]
        [classes] = [each.outputs.probs for each in llm.classify("w1 w2")]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    with vllm_server(tmp_path, *options) as (address, _):
        body = httpx.post(f"{address}/score", json={"text_1": "w1 w2", "text_2": documents}).json()
        assert [each["score"] for each in body["data"]] == scores
        body = httpx.post(f"{address}/rerank", json={"query": "w1 w2", "documents": documents}).json()
        assert {each["index"]: each["relevance_score"] for each in body["results"]} == dict(enumerate(scores))
        body = httpx.post(f"{address}/classify", json={"input": "w1 w2"}).json()
        assert body["data"][0]["probs"] == classes
