"""The error of one schema of which no grammar can be made names its place, in each protocol's words."""

import pytest

GOOD = {"type": "object", "properties": {"a": {"type": "string"}}}
BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\bfoo"}}}
PLACE = "of 'bad': #/properties/a/pattern="
MESSAGES = [{"role": "user", "content": "Hi"}]


def functions(nested):
    pairs = [("good", GOOD), ("bad", BAD), ("other", GOOD)]
    tools = [{"name": name, "parameters": schema} for name, schema in pairs]
    return [{"type": "function", "function": tool} if nested else {"type": "function", **tool} for tool in tools]


def named(tools):
    return [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "tools": functions(True), "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "tools": functions(False), "tool_choice": "required"},
            "tools[1].parameters",
        ),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 4, "tools": named(functions(False)), "tool_choice": {"type": "any"}},
            "tools[1].input_schema",
        ),
    ],
)
def test_one_bad_tool_of_many_is_named(http, path, body, place):
    response = http.post(path, json={"model": "jaxis-tiny", **body})
    assert response.status_code == 400
    assert f"{place} {PLACE}" in response.json()["error"]["message"]


def test_llama_cpps_schema_of_a_json_object_is_applied(http):
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": MESSAGES, "response_format": {"type": "json_object", "schema": schema}, "max_tokens": 20}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert "".join(choice["message"]["content"].split()) == '{"a":7}'
