"""SGLang's /generate, in the shapes that slime and verl send and read."""

import itertools
import json

import pytest

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def generate(http, **body):
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ids_go_in_and_ids_and_logprobs_come_out(http, client):
    answer = generate(
        http,
        input_ids=PROMPT,
        sampling_params={"max_new_tokens": 6, "temperature": 0, "skip_special_tokens": False, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )
    same = client.completions.create(
        model="jaxis-tiny",
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True, "prompt_logprobs": 2, "skip_special_tokens": False, "ignore_eos": True},
    ).choices[0]
    meta = answer["meta_info"]
    assert answer["text"] == same.text
    assert answer["output_ids"] == same.token_ids
    logprobs, ids, texts = zip(*meta["output_token_logprobs"], strict=True)
    assert (list(logprobs), list(ids), list(texts)) == (
        same.logprobs.token_logprobs,
        same.token_ids,
        same.logprobs.tokens,
    )
    assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0][0] is None
    scored = [entry[str(i)]["logprob"] for i, entry in zip(PROMPT[1:], same.prompt_logprobs[1:], strict=True)]
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == scored
    assert [len(entries) for entries in meta["output_top_logprobs"]] == [2] * 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)


def test_a_batch_is_a_list_and_n_multiplies_it(http):
    params = {"max_new_tokens": 3, "n": 2, "sampling_seed": 8}
    answers = generate(http, text=["One", "Two"], sampling_params=params)
    assert [len(each["output_ids"]) for each in answers] == [3] * 4
    single = generate(http, input_ids=[[5, 6], [7, 8]], sampling_params={"max_new_tokens": 2})
    assert [each["meta_info"]["completion_tokens"] for each in single] == [2, 2]


def test_each_event_of_a_stream_has_all_so_far(http):
    body = {"text": "One two", "sampling_params": {"max_new_tokens": 8, "sampling_seed": 2}, "return_logprob": True}
    whole = generate(http, **body)
    text = http.post("/generate", json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    assert events[0]["meta_info"]["finish_reason"] is None


def test_what_ended_an_answer_is_named(http):
    answer = generate(http, text="One", sampling_params={"regex": "[ab]{3}c", "max_new_tokens": 30, "stop": "c"})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "c"}
    assert len(answer["text"]) == 3


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input_ids": [5, 10**6]}, "input_ids"),
        ({"input_ids": [5, -1]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({}, "input_ids"),
        ({"text": "x", "input_ids": [1]}, "input_ids"),
        ({"text": "x", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "x", "sampling_params": {"top_p": 2.0}}, "sampling_params.top_p"),
        (
            {"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "x", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
    ],
)
def test_what_is_wrong_is_named(http, body, name):
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert name in f"{error['param']} {error['message']}"
