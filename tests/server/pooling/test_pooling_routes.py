"""The routes of a model that makes vectors: its clients get the vectors that transformers computes."""

from __future__ import annotations

import base64
import concurrent.futures
import re

import httpx
import numpy as np
import ollama
import openai
import pytest

from jaxis import LLM
from jaxis.kernels import native
from tests.server.pooling.conftest import serving
from tests.support.encoder_checkpoints import reference, texts


def post(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def embeddings(http, inputs, **body):
    answer = post(http, "/v1/embeddings", input=inputs, **body)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


def test_openais_client_gets_the_references_vectors(url, encoder):
    ids = texts(20)
    expected = np.array([reference(encoder[1], each, "mean") for each in ids])
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="jaxis-tiny", input=ids)  # asks for base64
        as_floats = client.embeddings.create(model="jaxis-tiny", input=ids, encoding_format="float")
        one = client.embeddings.create(model="jaxis-tiny", input="w3 w4")
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, rtol=0, atol=2e-6)
    # Both are the same float32, written differently.
    for coded, plain in zip(answer.data, as_floats.data, strict=True):
        np.testing.assert_array_equal(np.float32(coded.embedding), np.float32(plain.embedding))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert one.usage.prompt_tokens == 4


@pytest.mark.skipif(not native.usable(), reason="XLA does not promise it")
def test_clients_share_steps_and_get_the_vectors_that_they_get_alone(http):
    ids = texts(40)
    alone = np.concatenate([embeddings(http, [each]) for each in ids])
    parts = [ids[start::5] for start in range(5)]
    with concurrent.futures.ThreadPoolExecutor(5) as threads:
        found = list(threads.map(lambda part: embeddings(http, part), parts))
    for start, vectors in enumerate(found):
        np.testing.assert_array_equal(vectors, alone[start::5])


def test_coheres_fields_ask_for_the_vectors_in_each_type(http):
    prompts = ["w1 w2 w3", "w9", "w4 " * 100]
    expected = embeddings(http, prompts, truncate_prompt_tokens=-1)
    body = {"model": "jaxis-tiny", "input_type": "search_document", "texts": prompts}
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = post(http, "/v2/embed", **body, embedding_types=kinds)
    assert answer["response_type"] == "embeddings_by_type"
    assert answer["texts"] == prompts
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 5 + 3 + 64}}
    found = answer["embeddings"]
    assert list(found) == kinds
    np.testing.assert_array_equal(np.float32(found["float"]), expected)
    decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in found["base64"]]
    np.testing.assert_array_equal(decoded, expected)
    integers = np.array(found["int8"])
    lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(integers, axis=1)
    assert np.min(np.sum(expected * integers, axis=1) / lengths) > 0.9995
    # As many steps for all vectors: products of two are those of the vectors, but for rounding.
    units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(integers @ integers.T / np.sum(integers[0] ** 2), units @ units.T, atol=0.03)
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, integers)
    np.testing.assert_array_equal(np.unpackbits(np.uint8(found["ubinary"]), axis=1), expected > 0)
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])
    assert list(post(http, "/v2/embed", **body)["embeddings"]) == ["float"]
    for wrong, named in (
        ({"truncate": "NONE"}, "texts[2]"),
        ({"truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"output_dimension": 5}, "output_dimension"),
        ({"texts": ["w1", ""]}, "texts[1]"),
        ({"images": ["data:image/png;base64,"]}, "images"),
        ({"truncate": "START"}, "truncate"),
    ):
        response = http.post("/v2/embed", json=body | wrong)
        assert response.status_code == 400, response.text
        assert named in response.text
    cut = post(http, "/v2/embed", **body, max_tokens=4)
    np.testing.assert_array_equal(
        np.float32(cut["embeddings"]["float"]), embeddings(http, prompts, truncate_prompt_tokens=4)
    )


def test_scores_are_cosines_and_ties_stay_in_order(http):
    query, documents = "w1 w2", ["w9 w8", "w2 w1", {"text": "w9 w8"}, "w3"]
    plain = [each if isinstance(each, str) else each["text"] for each in documents]
    first, *others = embeddings(http, [query, *plain])
    cosines = [float(first @ other / np.linalg.norm(first) / np.linalg.norm(other)) for other in others]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(http, path, query=query, documents=documents)
        order = sorted(range(4), key=lambda index: (-answer["results"][index]["relevance_score"], index))
        assert order == list(range(4))
        for result in answer["results"]:
            assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-6)
            assert result["document"]["text"] == plain[result["index"]]
        indices = [result["index"] for result in answer["results"]]
        assert indices.index(2) == indices.index(0) + 1  # the same document
    best = post(http, "/rerank", query=query, documents=documents, top_n=1, return_documents=False)["results"]
    assert best == [{"index": indices[0], "relevance_score": max(r["relevance_score"] for r in answer["results"])}]
    scores = post(http, "/score", text_1=query, text_2=plain)["data"]
    assert [each["score"] for each in scores] == pytest.approx(cosines, abs=1e-6)
    scores = post(http, "/v1/score", queries=["w3", query], documents=[{"text": "w3"}, "w2 w1"])["data"]
    assert [each["score"] for each in scores] == pytest.approx([1.0, cosines[1]], abs=1e-6)


def test_ollamas_client_and_llama_servers_route(url, http):
    expected = embeddings(http, ["w3 w4", "w5"])
    client = ollama.Client(url)
    answer = client.embed("jaxis-tiny", ["w3 w4", "w5"])
    np.testing.assert_array_equal(np.float32(answer.embeddings), expected)
    assert answer.prompt_eval_count == 7
    np.testing.assert_array_equal(np.float32(client.embed("jaxis-tiny", "w5").embeddings), expected[1:])
    np.testing.assert_array_equal(np.float32(client.embeddings("jaxis-tiny", "w5").embedding), expected[1])
    assert client.embed("jaxis-tiny", "").embeddings == []
    long = client.embed("jaxis-tiny", "w1 " * 100)  # cut, as Ollama does
    assert long.prompt_eval_count == 64
    with pytest.raises(ollama.ResponseError, match="more than the 64 that the model takes"):
        client.embed("jaxis-tiny", "w1 " * 100, truncate=False)
    assert client.show("jaxis-tiny").capabilities == ["embedding"]
    for path, body in (("/embedding", {"content": "w5"}), ("/embeddings", {"input": ["w5"]})):
        [entry] = post(http, path, **body)
        np.testing.assert_array_equal(np.float32(entry["embedding"]), expected[1:])


def test_too_long_is_cut_where_that_is_asked_for(http):
    cut = embeddings(http, "w1 " * 100, truncate_prompt_tokens=4)
    np.testing.assert_array_equal(cut, embeddings(http, [[2, 6, 6, 3]]))
    [coded] = post(http, "/v1/embeddings", input="w1 w1", encoding_format="base64")["data"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded["embedding"]), "<f4"), cut[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": ["w1", ""]}, r"input\[1\] is empty"),
        ("/v1/embeddings", {"input": ""}, "input is empty"),
        ("/v1/embeddings", {"input": []}, "at least 1 item"),
        ("/v1/embeddings", {"input": [[2, 200, 3]]}, r"input\[0\] has a token id outside of 0 to 199"),
        ("/v1/embeddings", {"input": ["w1", "w1 " * 63]}, r"input\[1\] has 65 tokens, more than the 64"),
        ("/v1/embeddings", {"input": "w1 " * 63, "truncate_prompt_tokens": 65}, "more than the 64 tokens"),
        ("/v1/embeddings", {"input": "w1", "dimensions": 32}, "dimensions=32 cannot be honoured"),
        ("/v1/embeddings", {"input": "w1", "prompt_name": "query"}, "no prompt for texts of kind 'query'"),
        ("/v1/embeddings", {"input": "w1", "encoding_format": "int8"}, "encoding_format"),
        ("/rerank", {"query": "w1", "documents": ["w1", ""]}, r"documents\[1\] is empty"),
        ("/rerank", {"query": "", "documents": ["w1"]}, "query is empty"),
        ("/rerank", {"query": "w1", "documents": []}, "at least 1 item"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1"]}, "text_1 has 2 texts and text_2 has 1"),
        ("/score", {"text_1": "w1"}, "text_2 is missing"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "generates no text"),
        ("/v1/completions", {"prompt": "a"}, "generates no text"),
        ("/completion", {"prompt": "a"}, "generates no text"),
        ("/api/chat", {"model": "jaxis-tiny", "messages": [{"role": "user", "content": "a"}]}, "generates no text"),
    ],
)
def test_what_cannot_be_honoured_is_one_clear_line(http, path, body, message):
    response = http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    text = error if isinstance(error, str) else error["message"]
    assert "\n" not in text
    assert re.search(message, text), text


def test_the_queue_is_bounded(llm):
    with serving(llm, max_queued=0) as url, httpx.Client(base_url=url, timeout=60) as http:
        response = http.post("/score", json={"text_1": ["w1"] * 2048, "text_2": ["w1"] * 2048})
        assert response.status_code == 400
        assert "4096 texts, and this server holds at most 2048" in response.json()["error"]["message"]


def test_dimensions_of_a_model_that_is_trained_for_them(encoder):
    overrides = {"matryoshka_dimensions": [16, 32]}
    with (
        LLM(encoder[0], show_progress=False, max_num_batched_tokens=64, hf_overrides=overrides) as llm,
        serving(llm) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        [whole], [cut] = embeddings(http, "w1 w2"), embeddings(http, "w1 w2", dimensions=16)
        np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), rtol=1e-6)
        refused = http.post("/v1/embeddings", json={"input": "w1", "dimensions": 17})
        assert "be cut to 16, 32 elements" in refused.json()["error"]["message"]


def test_models_metrics_and_keys(http, llm):
    [card] = http.get("/v1/models").json()["data"]
    assert (card["capabilities"], card["max_model_len"]) == (["embedding"], 64)
    before = _counted(http)
    embeddings(http, ["w1", "w2 w3"])
    assert _counted(http) - before == 7
    with serving(llm, api_keys=("k",)) as url, httpx.Client(base_url=url, timeout=60) as locked:
        for path in ("/v1/embeddings", "/rerank", "/score", "/api/embed", "/embedding"):
            assert locked.post(path, json={}).status_code == 401


def _counted(http):
    for line in http.get("/metrics").text.splitlines():
        if line.startswith("jaxis:prompt_tokens_total"):
            return float(line.split()[-1])
    raise AssertionError


def test_a_model_that_chats_makes_no_vectors(server):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["a"]}),
            ("/score", {"text_1": "a", "text_2": "a"}),
            ("/api/embed", {"model": "jaxis-tiny", "input": "a"}),
            ("/embedding", {"content": "a"}),
        ):
            response = http.post(path, json=body)
            assert response.status_code == 400
            assert "generates text and makes no vectors" in str(response.json()["error"])
