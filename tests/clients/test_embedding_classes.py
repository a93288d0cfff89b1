"""Packages that make vectors of texts and put documents in order: each gets what the server gives without it."""

import httpx
import numpy as np
import pytest

from jaxis import LLM
from tests.server.pooling.conftest import serving
from tests.support.encoder_checkpoints import save_classifier, save_model, save_pooling

pytestmark = pytest.mark.client
TEXTS = ["w1 w2 w3", "w9", "w4 w5"]
MODEL = "jaxis-tiny"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    save_model(folder)
    save_pooling(folder, max_seq_length=64)
    with LLM(folder, show_progress=False, max_num_batched_tokens=256) as llm, serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def expected(url):
    answer = httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS}, timeout=60)
    return np.float32([entry["embedding"] for entry in answer.json()["data"]])


@pytest.fixture(scope="module")
def reranker_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    save_classifier(folder, num_labels=1)
    with LLM(folder, show_progress=False, max_num_batched_tokens=256) as llm, serving(llm) as url:
        yield url


@pytest.fixture(scope="module")
def ranked(reranker_url):
    """(index, score) of the two documents that suit the first text best."""
    body = {"query": TEXTS[0], "documents": TEXTS, "top_n": 2}
    results = httpx.post(f"{reranker_url}/rerank", json=body, timeout=60).json()["results"]
    return [(each["index"], pytest.approx(each["relevance_score"], rel=1e-6)) for each in results]


def check_langchain(embeddings, expected):
    np.testing.assert_array_equal(np.float32(embeddings.embed_documents(TEXTS)), expected)
    np.testing.assert_array_equal(np.float32(embeddings.embed_query(TEXTS[1])), expected[1])


def test_langchain_openai(url, expected):
    package = pytest.importorskip("langchain_openai")
    # It would ask the network how OpenAI's own models cut texts into tokens.
    settings = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "check_embedding_ctx_length": False}
    check_langchain(package.OpenAIEmbeddings(**settings), expected)


def test_langchain_ollama(url, expected):
    package = pytest.importorskip("langchain_ollama")
    check_langchain(package.OllamaEmbeddings(base_url=url, model=MODEL), expected)


def check_llama_index(embedding, expected):
    np.testing.assert_array_equal(np.float32(embedding.get_text_embedding_batch(TEXTS)), expected)
    np.testing.assert_array_equal(np.float32(embedding.get_query_embedding(TEXTS[1])), expected[1])


def test_llama_index_openai(url, expected):
    package = pytest.importorskip("llama_index.embeddings.openai_like")
    embedding = package.OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none")
    check_llama_index(embedding, expected)


def test_llama_index_ollama(url, expected):
    package = pytest.importorskip("llama_index.embeddings.ollama")
    check_llama_index(package.OllamaEmbedding(model_name=MODEL, base_url=url), expected)


def test_llama_index_jina_rerank(reranker_url, ranked):
    package = pytest.importorskip("llama_index.postprocessor.jinaai_rerank")
    from llama_index.core.schema import NodeWithScore, TextNode

    rerank = package.JinaRerank(top_n=2, model=MODEL, base_url=f"{reranker_url}/v1", api_key="none")
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(TEXTS)]
    found = rerank.postprocess_nodes(nodes, query_str=TEXTS[0])
    assert [(int(each.node.id_), each.score) for each in found] == ranked


def test_cohere(url, expected, reranker_url, ranked):
    package = pytest.importorskip("cohere")
    client = package.ClientV2(api_key="none", base_url=url)
    answer = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"])
    np.testing.assert_array_equal(np.float32(answer.embeddings.float_), expected)
    answer = package.ClientV2(api_key="none", base_url=reranker_url).rerank(
        model=MODEL, query=TEXTS[0], documents=TEXTS, top_n=2
    )
    assert [(each.index, each.relevance_score) for each in answer.results] == ranked
