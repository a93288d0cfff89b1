"""The routes of classifiers and cross-encoders: their clients get the scores that transformers computes."""

from __future__ import annotations

import json
import re
import shlex
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from jaxis import LLM
from jaxis.cli.serve import start_lines
from jaxis.server.config import ServerConfig
from tests.pooling.test_classifiers import DOCUMENTS, QUERIES, logits_of, pair_of, sigmoid, softmax
from tests.server.pooling.conftest import serving
from tests.support.encoder_checkpoints import save_classifier, texts


def serve(folder):
    return LLM(folder, show_progress=False, max_num_batched_tokens=256, max_num_seqs=16)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """(client, the model in the reference) of a cross-encoder."""
    folder = tmp_path_factory.mktemp("served-reranker")
    model = save_classifier(folder, num_labels=1)
    with serve(folder) as llm, serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """(client, the model in the reference) of a classifier."""
    folder = tmp_path_factory.mktemp("served-classifier")
    model = save_classifier(folder, id2label={0: "bad", 1: "so-so", 2: "good"})
    with serve(folder) as llm, serving(llm) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http, model


def post(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_cross_encoder_reads_both_texts(reranker):
    http, model = reranker
    documents = [*DOCUMENTS, DOCUMENTS[0]]
    logits = [logits_of(model, *pair_of(QUERIES[0], text))[0] for text in documents]
    num_tokens = sum(len(pair_of(QUERIES[0], text)[0]) for text in documents)
    for path in ("/score", "/v1/score"):
        answer = post(http, path, text_1=QUERIES[0], text_2=documents)
        np.testing.assert_allclose([each["score"] for each in answer["data"]], sigmoid(np.array(logits)), atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == num_tokens
    order = sorted(range(4), key=lambda index: (-np.float32(logits[index]), index))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = post(http, path, query=QUERIES[0], documents=documents, use_activation=False)["results"]
        assert [each["index"] for each in results] == order
        np.testing.assert_allclose([each["relevance_score"] for each in results], np.sort(logits)[::-1], atol=1e-5)
    places = [each["index"] for each in results]
    assert places.index(3) == places.index(0) + 1  # ties in the order of the request
    assert http.get("/v1/models").json()["data"][0]["capabilities"] == ["rerank", "classification"]


def test_classes_have_names_and_probabilities(classifier):
    http, model = classifier
    ids = texts(10)
    expected = np.array([softmax(logits_of(model, each)) for each in ids])
    answer = post(http, "/classify", input=ids)
    np.testing.assert_allclose([each["probs"] for each in answer["data"]], expected, rtol=0, atol=1e-5)
    assert [each["label"] for each in answer["data"]] == [["bad", "so-so", "good"][row.argmax()] for row in expected]
    assert {each["num_classes"] for each in answer["data"]} == {3}
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    [one] = post(http, "/classify", input="w1 w2", use_activation=False)["data"]
    np.testing.assert_allclose(one["probs"], logits_of(model, [2, 6, 7, 3]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "path", "body", "message"),
    [
        ("reranker", "/rerank", {"query": "w1", "documents": ["w1", ""]}, r"documents\[1\] is empty"),
        ("reranker", "/rerank", {"query": "w1", "documents": ["w1", "w1 " * 90]}, r"documents\[1\] has 94 tokens"),
        ("reranker", "/score", {"text_1": "", "text_2": ["w1"]}, "text_1 is empty"),
        ("reranker", "/score", {"text_1": ["w1", "w2"], "text_2": ["w1"]}, "text_1 has 2 texts and text_2 has 1"),
        ("reranker", "/v1/embeddings", {"input": "w1"}, "makes scores and no vectors: ask /rerank or /score"),
        ("reranker", "/api/embed", {"input": "w1"}, "makes scores and no vectors"),
        ("reranker", "/api/embeddings", {"prompt": "w1"}, "makes scores and no vectors"),
        ("reranker", "/embedding", {"content": "w1"}, "makes scores and no vectors"),
        ("reranker", "/score", {"text_1": "a", "text_2": "b", "softmax": True, "activation": False}, "use_activation"),
        ("classifier", "/score", {"text_1": "w1", "text_2": "w2"}, "has 3 labels, so it has no score of a pair"),
        ("classifier", "/classify", {"input": ["w1", ""]}, r"input\[1\] is empty"),
        ("classifier", "/v1/embeddings", {"input": "w1"}, "makes scores and no vectors: ask /classify"),
        ("http", "/classify", {"input": "w1"}, "makes vectors and has no labels: ask /v1/embeddings"),
    ],
)
def test_what_cannot_be_honoured_is_one_clear_line(request, name, path, body, message):
    found = request.getfixturevalue(name)
    response = (found[0] if isinstance(found, tuple) else found).post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert "\n" not in text
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("name", "capabilities"), [("reranker", ("rerank", "classification")), ("classifier", ("classification",))]
)
def test_the_command_that_the_start_message_shows_works(name, capabilities, request):
    http, _ = request.getfixturevalue(name)
    info = SimpleNamespace(capabilities=capabilities, max_num_seqs=16, max_model_len=64)
    engine = SimpleNamespace(info=info, unit="texts", tokenizer=None)
    _, url, *_, data = shlex.split(start_lines(engine, ServerConfig(), "127.0.0.1", 80, tls=False)[-1])
    assert post(http, httpx.URL(url).path, **json.loads(data))
