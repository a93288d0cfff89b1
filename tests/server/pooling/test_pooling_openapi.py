"""The OpenAPI document is true of routes that make vectors and scores: see `tests/server/http/test_openapi.py`."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from tests.server.openapi import check_answers  # noqa: E402

PATHS = {
    *("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed", "/classify"),
    *("/api/embed", "/api/embeddings", "/embedding"),
}


@pytest.mark.parametrize(
    ("max_examples", "paths"),
    [(1, {"/v1/embeddings", "/score"}), pytest.param(200, PATHS, marks=pytest.mark.slow)],
)
def test_answers_are_as_documented(url, max_examples, paths):
    document = schemathesis.openapi.from_url(f"{url}/openapi.json", timeout=60)
    assert document.raw_schema["paths"].keys() >= PATHS
    statuses = check_answers(document, max_examples, paths=paths)
    assert {400} <= statuses <= {200, 400, 404, 405, 413}
