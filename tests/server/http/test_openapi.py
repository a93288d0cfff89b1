"""The OpenAPI document is true: data made from it, right and wrong, gets answers that it describes, and no 5xx."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from tests.server.openapi import check_answers  # noqa: E402

KEY = {"Authorization": "Bearer secret"}
ROUTES = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/ping",
    "/load",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/props",
    "/tokenizer_info",
    "/apply-template",
    "/completion",
    "/api/version",
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/pull",
    "/api/chat",
    "/api/generate",
}
EVENT_STREAMS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/completion"}


@pytest.fixture
def document(serve):
    """The document of a server with a key, and its address."""
    server = serve(api_keys=("secret",))
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=KEY, timeout=60)
    return document, server


def test_document_lists_routes_errors_streams_and_the_key(document):
    schema = document[0].raw_schema
    assert schema["paths"].keys() >= ROUTES
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "422" not in responses
            if path in ("/health", "/ready", "/ping"):
                assert operation["security"] == []
            else:
                shape = "MessageErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
                shape = "OllamaError" if path.startswith("/api/") else shape
                assert responses["401"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{shape}")
            if path in EVENT_STREAMS:
                assert {"400", "404", "429", "503"} <= responses.keys()
                assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
            if path in ("/api/chat", "/api/generate", "/api/pull"):
                assert set(responses["200"]["content"]) == {"application/json", "application/x-ndjson"}
    assert schema["security"] == [{"api_key": []}, {"x_api_key": []}]


# Of each protocol, a route whose body has most fields; of one without a body, and of one with a path's parameter.
QUICK = {"/v1/chat/completions", "/v1/messages", "/api/chat", "/health", "/v1/models/{model}"}


@pytest.mark.parametrize(("max_examples", "paths"), [(1, QUICK), pytest.param(200, None, marks=pytest.mark.slow)])
def test_answers_are_as_documented(document, max_examples, paths):
    schema, server = document
    statuses = check_answers(schema, max_examples, headers=KEY, paths=paths)
    assert {200, 400} <= statuses <= {200, 400, 401, 403, 404, 405, 413, 431}
    server.wait_until_idle()
