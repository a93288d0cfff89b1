"""OpenAI's batch files: what is applied, what is refused, and the form of responses."""

import functools
import json

import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.errors import RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.inference.openai_batch import CHAT_URL, COMPLETIONS_URL, CUSTOM_ID, RESPONSES_URL, BatchTask
from jaxis.inference.run import MemorySink, answer_rows, run
from jaxis.jsonl.source import ListSource, Row
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.server.generation.served_model import ServedModel

MESSAGES = [{"role": "user", "content": "hello"}]


def prepared(served, url=COMPLETIONS_URL, **body):
    """Prompt and parameters of one request."""
    required = {"prompt": [1, 2]} if url == COMPLETIONS_URL else {"messages": MESSAGES}
    row = Row(0, {CUSTOM_ID: "r0", "url": url, "body": {**required, **body}}, "r0")
    return BatchTask(served, "key").prepare(row)


@pytest.fixture
def model():
    """One without a tokenizer."""
    defaults = SamplingParams(temperature=0.3, top_k=7, max_tokens=None)
    return ServedModel(
        names=("model",),
        tokenizer=None,
        default_sampling_params=defaults,
        grammar_compiler=GrammarCompiler(None, 8, ()),
        parsers=ModelParsers.select(None, None),
    )


def responses(llm, *lines, names=("model",)):
    source = ListSource(
        [{CUSTOM_ID: f"r{i}", "url": COMPLETIONS_URL, **line} for i, line in enumerate(lines)], CUSTOM_ID
    )
    sink = MemorySink(source.num_rows)
    model = ServedModel(
        names=names,
        tokenizer=llm.tokenizer,
        default_sampling_params=llm.get_default_sampling_params(),
        grammar_compiler=llm.engine.grammar_compiler,
        parsers=ModelParsers.select(llm.tokenizer, None),
    )
    task = BatchTask(model, "key")
    run(functools.partial(answer_rows, llm.engine, task), source, sink, display=ProgressDisplay(False))
    return json.loads(json.dumps(sink.values))


def test_parameters_reach_the_sampler(model):
    given = {
        **{"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 4, "stop": "x"},
        **{"frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1, "min_tokens": 2},
        **{"ignore_eos": True, "allowed_token_ids": [1, 2], "stop_token_ids": [3], "bad_words": ["y"]},
    }
    _, params, _ = prepared(model, **given, max_tokens=9, logit_bias={"1": 5}, logprobs=2, user=None)
    assert params == SamplingParams(**given, max_tokens=9, logit_bias={1: 5}, logprobs=2)


def test_what_is_not_given_is_the_checkpoints(model):
    prompt, params, _ = prepared(model, temperature=None, stream=False, response_format={"type": "text"})
    assert prompt.token_ids == [1, 2]
    assert params == SamplingParams(temperature=0.3, top_k=7, max_tokens=16, seed=params.seed)
    assert params.seed is not None  # the row's own


@pytest.mark.parametrize(
    ("url", "body", "named"),
    [
        (CHAT_URL, {"stream": True}, "stream=true"),
        (CHAT_URL, {"priority": 1}, "priority"),
        (COMPLETIONS_URL, {"best_of": 3}, "best_of"),
        (CHAT_URL, {"tempature": 1}, "tempature"),
        (CHAT_URL, {"logprobs": 3}, "logprobs"),
        (CHAT_URL, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT_URL, {"logit_bias": [1]}, "logit_bias"),
        (CHAT_URL, {"model": 3}, "model"),
        (CHAT_URL, {"model": "gpt"}, "--served-model-name"),
        (CHAT_URL, {"messages": "hello"}, "messages"),
        (CHAT_URL, {"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content"),
        (CHAT_URL, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (CHAT_URL, {"prompt": "x"}, "prompt"),
        (COMPLETIONS_URL, {"prompt": None}, "prompt"),
        (COMPLETIONS_URL, {"prompt": [[1], [2]]}, "2 prompts"),
        (COMPLETIONS_URL, {"prompt": "x"}, "no tokenizer"),
        ("/v1/embeddings", {}, "url="),
    ],
)
def test_what_cannot_be_honoured_is_named(model, url, body, named):
    with pytest.raises(RequestError, match=named):
        prepared(model, url, **body)


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


def test_forms_tools_and_responses_as_the_server_has_them():
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "Hi"}]
    demanded = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with LLM(show_progress=False, max_num_seqs=4, kv_cache_memory="8MiB") as llm:
        formed, called, answered, refused = responses(
            llm,
            {"url": CHAT_URL, "body": {"messages": messages, "response_format": form, "max_tokens": 300}},
            {"url": CHAT_URL, "body": {"messages": messages, **demanded, "max_tokens": 300}},
            {"url": RESPONSES_URL, "body": {"input": "What is the capital of France?"}},
            {"url": CHAT_URL, "body": {"messages": messages, "structured_outputs": {"regex": "("}}},
        )
    [choice] = formed["response"]["body"]["choices"]
    assert json.loads(choice["message"]["content"])["n"] in (1, 2)
    [choice] = called["response"]["body"]["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "pick")
    assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert "Paris" in answered["response"]["body"]["output"][0]["content"][0]["text"]
    assert "structured_outputs" in refused["error"]["message"]
