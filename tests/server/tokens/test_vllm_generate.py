"""vLLM's /inference/v1/generate, and its render endpoints, whose answers are its bodies."""

import json

import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def generate(http, **body):
    answer = http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks_of(http, path, **body):
    text = http.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_ids_go_in_and_ids_and_logprobs_come_out(http, client):
    params = {"max_tokens": 6, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    answer = generate(http, token_ids=PROMPT, sampling_params=params, request_id="rollout-1", return_token_ids=True)
    [choice] = answer["choices"]
    assert answer["request_id"] == "rollout-1"
    assert answer["prompt_token_ids"] == PROMPT
    assert "text" not in choice
    same = client.completions.create(
        model="jaxis-tiny",
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True},
    ).choices[0]
    assert choice["token_ids"] == same.token_ids
    content = choice["logprobs"]["content"]
    assert [position["token_id"] for position in content] == choice["token_ids"]
    assert [position["logprob"] for position in content] == same.logprobs.token_logprobs
    assert [position["token"] for position in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(position["top_logprobs"][0]["token_id"] == position["token_id"] for position in content)
    assert answer["prompt_logprobs"][0] is None
    assert [str(token_id) in entry for token_id, entry in zip(PROMPT[1:], answer["prompt_logprobs"][1:], strict=True)]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert isinstance(answer["seed"], int)


def test_a_stream_has_what_the_whole_answer_has(http):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "seed": 4, "n": 2, "logprobs": 1}}
    whole = generate(http, **body, output_mode="text")
    chunks = chunks_of(
        http, "/inference/v1/generate", **body, output_mode="text", stream_options={"include_usage": True}
    )
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [p for part in parts for p in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"token_ids": [5, 10**6]}, "token_ids"),
        ({"token_ids": [5, -1]}, "token_ids"),
        ({"token_ids": [5, "6"]}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [5], "sampling_params": {"temprature": 1.0}}, "sampling_params.temprature"),
        ({"token_ids": [5], "sampling_params": {"beam_width": 4}}, "sampling_params.beam_width"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"token_ids": [5], "sampling_params": {"stop_token_ids": [10**6]}}, "sampling_params.stop_token_ids"),
        ({"token_ids": [5], "sampling_params": {"min_tokens": 5, "max_tokens": 4}}, "sampling_params.min_tokens"),
        ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_what_is_wrong_is_named(http, body, name):
    answer = http.post("/inference/v1/generate", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert name in f"{error['param']} {error['message']}"


def test_a_grammar_applies_from_the_first_token(http, server):
    params = {"max_tokens": 10, "structured_outputs": {"choice": ["yes", "no"]}}
    [choice] = generate(http, token_ids=PROMPT, sampling_params=params, output_mode="text")["choices"]
    assert choice["text"] in ("yes", "no")
    assert server.engine.tokenizer.decode(choice["token_ids"]) == choice["text"]


def test_a_rendered_conversation_is_the_body_of_a_request_with_the_same_answer(http, client):
    request = {"messages": MESSAGES, "max_tokens": 8, "seed": 11, "temperature": 0.9, "logit_bias": {"40": 2}}
    rendered = http.post("/v1/chat/completions/render", json=request).json()
    answer = client.chat.completions.create(model="jaxis-tiny", **request, extra_body={"return_token_ids": True})
    assert rendered["token_ids"] == answer.prompt_token_ids
    assert "extension" not in rendered
    assert generate(http, **rendered)["choices"][0]["token_ids"] == answer.choices[0].token_ids
    request = {"prompt": ["One", "Two"], "max_tokens": 3, "temperature": 0}
    rendered = http.post("/v1/completions/render", json=request).json()
    choices = client.completions.create(model="jaxis-tiny", **request, extra_body={"return_token_ids": True}).choices
    assert [generate(http, **each)["choices"][0]["token_ids"] for each in rendered] == [c.token_ids for c in choices]


def test_a_rendered_conversation_says_whether_it_extends_an_earlier_one(http, server):
    first = http.post("/v1/chat/completions/render", json={"messages": MESSAGES}).json()["token_ids"]
    turns = [*MESSAGES, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}]
    said = server.engine.tokenizer.encode("Paris.", add_special_tokens=False)

    def extension(messages, previous):
        body = {"messages": messages, "previous_token_ids": previous}
        return http.post("/v1/chat/completions/render", json=body).json()

    rendered = extension(turns, first + said)
    assert rendered["extension"]["extends"] is True
    changed = [{**MESSAGES[0], "content": "What is the capital of Spain?"}, *turns[1:]]
    for messages, previous, index in (
        (changed, first + said, 0),
        ([turns[0], {**turns[1], "content": "Lyon."}, turns[2]], rendered["token_ids"], 1),
        ([*turns[:2], {**turns[2], "content": "And of Spain?"}], rendered["token_ids"], 2),
        ([*turns[:2], {**turns[2], "role": "assistant"}], rendered["token_ids"], 2),
    ):
        answer = extension(messages, previous)
        found = answer["extension"]
        assert found["extends"] is False
        common = found["num_common_tokens"]
        assert answer["token_ids"][:common] == previous[:common]
        assert (found["token_id"], found["previous_token_id"]) == (answer["token_ids"][common], previous[common])
        assert found["token_id"] != found["previous_token_id"]
        assert found["message_index"] == index


def test_what_a_rendering_cannot_carry_is_refused(http):
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    answer = http.post("/v1/chat/completions/render", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
