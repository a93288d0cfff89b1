"""OpenAI's batch files: what is applied, what is refused, and the form of responses."""

import json

import pytest

from jaxis import SamplingParams
from jaxis.errors import RequestError
from jaxis.inference.openai_batch import CUSTOM_ID, BatchTask
from jaxis.inference.openai_request import CHAT_URL, COMPLETIONS_URL, parse_request
from jaxis.inference.run import MemorySink, run
from jaxis.inference.source import ListSource
from jaxis.progress import ProgressDisplay

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**body):
    return parse_request(CHAT_URL, {"messages": MESSAGES, **body})


def responses(llm, *lines):
    source = ListSource(
        [{CUSTOM_ID: f"r{i}", "url": COMPLETIONS_URL, **line} for i, line in enumerate(lines)], CUSTOM_ID
    )
    sink = MemorySink(source.num_rows)
    run(llm.engine, source, BatchTask(llm, ["model"], "key"), sink, display=ProgressDisplay(False))
    return json.loads(json.dumps(sink.values))


def test_parameters_reach_the_sampler():
    given = {
        **{"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4, "stop": "x"},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1, "min_tokens": 2},
        **{"ignore_eos": True, "allowed_token_ids": [1, 2], "stop_token_ids": [3], "bad_words": ["y"]},
    }
    params = chat(
        **given, max_completion_tokens=9, logit_bias={"1": 5}, logprobs=True, top_logprobs=2, user=None
    ).sampling_params(SamplingParams(temperature=1.0))
    expected = SamplingParams(**given, max_tokens=9, logit_bias={1: 5}, logprobs=2)
    assert params == expected


def test_what_is_not_given_is_the_checkpoints():
    defaults = SamplingParams(temperature=0.3, top_k=7, max_tokens=None)
    assert chat(temperature=None, stream=False, response_format={"type": "text"}).sampling_params(defaults) == defaults
    request = parse_request(COMPLETIONS_URL, {"prompt": [1, 2]})
    assert request.prompt == [1, 2]
    assert request.sampling_params(defaults) == SamplingParams(temperature=0.3, top_k=7, max_tokens=16)


def test_template_arguments_are_passed_on():
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = chat(tools=tools, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert request.template_arguments == {"tools": tools, "enable_thinking": False, "reasoning_effort": "low"}
    assert chat(tools=tools, tool_choice="none").template_arguments == {}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"stream": True}, "body.stream=True"),
        ({"response_format": {"type": "json_object"}}, "body.response_format"),
        ({"best_of": 3}, "body.best_of"),
        ({"tempature": 1}, "body.tempature"),
        ({"tool_choice": "required"}, "body.tool_choice"),
        ({"logprobs": 3}, "body.logprobs=3"),
        ({"top_logprobs": 3}, "body.top_logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"model": 3}, "body.model=3"),
        ({"messages": "hello"}, "body.messages"),
        ({"messages": [{"role": "user", "content": 1}]}, r"body.messages\[0\].content"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "body.prompt"),
    ],
)
def test_what_cannot_be_honoured_is_named(body, named):
    with pytest.raises(RequestError, match=named):
        chat(**body)


def test_prompts_are_one_text_or_one_list_of_ids():
    assert parse_request(COMPLETIONS_URL, {"prompt": ["a"]}).prompt == "a"
    for prompt in (None, [], ["a", "b"], [[1], [2]], 3, [True]):
        with pytest.raises(RequestError, match="must be one text"):
            parse_request(COMPLETIONS_URL, {"prompt": prompt})
    with pytest.raises(RequestError, match="url="):
        parse_request("/v1/embeddings", {})


def test_completions_are_those_of_llm_generate(batching_llm):
    body = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 5, "n": 2, "logprobs": 2}
    [line] = responses(batching_llm, {"body": body, "method": "POST"})
    [output] = batching_llm.generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, n=2, logprobs=2), progress=False
    )
    response = line["response"]
    assert (line[CUSTOM_ID], line["error"], response["status_code"]) == ("r0", None, 200)
    assert response["body"]["usage"]["completion_tokens"] == 10
    for choice, completion in zip(response["body"]["choices"], output.outputs, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (completion.text, completion.finish_reason)
        sampled = [next(iter(position.values())).logprob for position in completion.logprobs]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(sampled)


def test_a_request_that_fails_has_its_error_and_the_others_their_answers(batching_llm):
    good = {"prompt": [1, 2], "max_tokens": 2, "model": "model"}
    lines = responses(
        batching_llm,
        {"body": good},
        {"body": {**good, "model": "gpt"}},
        {"body": {**good, "temperature": -1}},
        {"body": "none"},
        {"body": good, "priority": 1},
        {"body": good, "method": "GET"},
        {"body": {**good, "prompt": [10**9]}},
        {"body": good},
    )
    assert [line["response"]["status_code"] for line in lines] == [200, 400, 400, 400, 400, 400, 400, 200]
    assert [line[CUSTOM_ID] for line in lines] == [f"r{i}" for i in range(8)]
    for line, named in zip(
        lines[1:7], ["--served-model-name", "temperature", '"body"', "priority", "method", str(10**9)], strict=True
    ):
        assert named in line["error"]["message"]
        assert line["response"]["body"]["error"]["type"] == "invalid_request_error"
