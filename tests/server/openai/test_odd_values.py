"""No value of any field makes the server fail: it is applied, or refused with an error object."""

import json

import pytest

from jaxis.server.openai.chat_schema import ChatCompletionRequest
from jaxis.server.openai.completions import CompletionRequest
from jaxis.server.openai.response_schema import ResponseRequest
from jaxis.server.openai.tokenize import DetokenizeRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS = [
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": MESSAGES, "max_tokens": 2}),
    ("/v1/completions", CompletionRequest, {"prompt": "Hi", "max_tokens": 2}),
    ("/v1/responses", ResponseRequest, {"input": "Hi", "max_output_tokens": 2}),
    ("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [1]}),
]
# As JSON text: some of them no JSON library would write.
ODD_VALUES = [
    "null", "true", "0", "1", "-1", "0.5", "1e400", "-0.0", "NaN", "-Infinity", "1" + "0" * 30, "1" + "0" * 5000,
    '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\u202e\\n"', "[]", "[null]", '[""]', "[[]]", "[-1]", "[99999999]",
    '["x", 1]', "{}", '{"": ""}', '{"1": 1}', '{"\\ud800": 1}', '{"__class__": "x"}', "[" * 200 + "]" * 200,
    '[{"role": "user"}]', '[{"role": "tool", "content": "x"}]', '[{"role": "assistant", "tool_calls": [{}]}]',
]  # fmt: skip


# Each field gets every fourth of the values, the next field those after them; when there is time, each gets all.
@pytest.mark.sampled(6)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("path", "model", "base"), REQUESTS, ids=[path for path, _, _ in REQUESTS])
def test_odd_values_are_applied_or_refused(server, http, path, model, base, every):
    for number, name in enumerate(model.model_fields):
        for value in ODD_VALUES[number % every :: every]:
            fields = {key: json.dumps(field) for key, field in base.items()} | {name: value}
            body = "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}"
            response = http.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400, 404), (name, value[:80], response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"], (name, value[:80])
                assert len(response.text) < 3000, (name, value[:80])
    server.wait_until_idle()
