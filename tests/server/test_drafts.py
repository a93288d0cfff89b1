"""Drafts change nothing that a client sees but how much of it comes at once: every protocol, whole and streamed."""

from __future__ import annotations

import json

import pytest

from jaxis.engine.drafting.speculation import DraftRequest
from jaxis.engine.speculation import NoSpeculation
from tests.support.drafters import TestDrafter, drafting, truth
from tests.support.quick_rows import quick_rows

MODEL = "jaxis-tiny"
MAX_DRAFTS = 4
PROMPT = "Once upon a time there was a river, and the river"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 6}},
    "required": ["a", "b"],
}

COMPLETION = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
CHAT = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
REQUESTS = {
    "greedy": ("completions", COMPLETION | {"ignore_eos": True}),
    "drawn": ("completions", COMPLETION | {"temperature": 0.9, "seed": 3, "ignore_eos": True}),
    "log-probabilities": ("completions", COMPLETION | {"logprobs": 2, "echo": True, "ignore_eos": True}),
    "several": ("completions", COMPLETION | {"prompt": [PROMPT, "1 2 3"], "n": 2, "temperature": 0.8, "seed": 1}),
    "stop": ("completions", COMPLETION | {"stop": ["= 30", "river"]}),
    "stop kept": ("completions", COMPLETION | {"stop": ["9"], "include_stop_str_in_output": True}),
    "stop tokens": ("completions", COMPLETION | {"stop_token_ids": [406]}),
    "regex": ("completions", COMPLETION | {"structured_outputs": {"regex": "(yes|no)(, (yes|no)){5,7}"}}),
    "token ids": ("completions", COMPLETION | {"logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}),
    "chat": ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}),
    "tool": ("chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required"}),
    "named tool": (
        "chat/completions",
        CHAT | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    ),
    "JSON": (
        "chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "messages": ("messages", {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}),
    "tool in messages": (
        "messages",
        {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "tool_choice": {"type": "any"}}
        | {"tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]},
    ),
    "responses": ("responses", {"input": "Name a city.", "max_output_tokens": 60, "temperature": 0}),
    "tool in responses": (
        "responses",
        {"input": "Name a city.", "max_output_tokens": 60, "temperature": 0, "tool_choice": "required"}
        | {"tools": [{"type": "function", **TOOL}]},
    ),
}
# An end within drafts: what would follow without these is drafted, too.
BEYOND_THE_END = {"stop": None, "stop_token_ids": None, "ignore_eos": True}
ENDING = {"stop", "stop kept", "stop tokens", "chat"}
# What differs from one answer to the next, or with the number of tokens that come at once.
OWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number", "obfuscation", "timings"}
OWN |= {"seed"}  # where none is sent, one is drawn for each


class Recorder(TestDrafter):
    """Drafts nothing, and keeps the answers, by prompt."""

    def __init__(self):
        super().__init__(lambda prompt, output, limit: [])
        self.answers = {}

    def forget(self, sequence):
        self.answers.setdefault(tuple(sequence.prompt_token_ids), []).append(list(sequence.output_token_ids))


class Oracle(TestDrafter):
    """Drafts the known answers.

    Attributes:
      num_steps: Steps that it did so in.
      reach: To how many tokens of an answer, at most.
    """

    def __init__(self, answers):
        super().__init__(truth(answers))
        self.num_steps = self.reach = 0

    def propose(self, requests: list[DraftRequest]):
        drafts = super().propose(requests)
        self.num_steps += any(drafts)
        for (sequence, _), draft in zip(requests, drafts, strict=True):
            self.reach = max(self.reach, len(sequence.output_token_ids) + len(draft))
        return drafts


def stripped(value):
    if isinstance(value, dict):
        return {name: stripped(part) for name, part in value.items() if name not in OWN}
    return [stripped(part) for part in value] if isinstance(value, list) else value


def added_up(events):
    """The deltas of a stream, added up by where they belong, and the other events, as they are."""
    texts, lists, others = {}, {}, []

    def add(place, delta):
        for name, value in delta.items():
            at = (*place, name)
            if isinstance(value, dict):
                add(at, value)
            elif isinstance(value, list):
                for part in value:
                    if isinstance(part, dict) and "index" in part:
                        add((*at, part["index"]), {k: v for k, v in part.items() if k != "index"})
                    else:
                        lists.setdefault(at, []).append(part)
            elif isinstance(value, str) and name != "type":
                texts[at] = texts.get(at, "") + value
            elif value is not None:
                texts[at] = value

    for event in map(stripped, events):
        if "choices" in event:  # completions and chat
            add((), {"choices": event["choices"], "usage": event.get("usage")})
        elif "delta" in event:  # messages and responses
            place = (event["type"], event.get("index", event.get("output_index")))
            add(place, event["delta"] if isinstance(event["delta"], dict) else {"delta": event["delta"]})
        else:
            others.append(event)
    return texts, lists, others


def asked(http, name, **more):
    """A request's answer, whole and as the events of its stream."""
    path, body = REQUESTS[name]
    body = {"model": MODEL, **body, **more}
    whole = http.post(f"/v1/{path}", json=body)
    assert whole.status_code == 200, whole.text
    options = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    streamed = http.post(f"/v1/{path}", json=body | {"stream": True} | options)
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    return stripped(whole.json()), [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", quick_rows(REQUESTS, REQUESTS.keys() - {"drawn", "regex", "token ids"}))
def test_an_answer_is_the_same_with_right_drafts(http, server, built_engine, monkeypatch, name):
    engine = built_engine.engine
    recorder = Recorder()
    with drafting(engine, recorder, MAX_DRAFTS):
        asked(http, name, **(BEYOND_THE_END if name in ENDING else {}))
        server.wait_until_idle()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "speculation", NoSpeculation())
        whole, events = asked(http, name)
        server.wait_until_idle()
    oracle = Oracle(recorder.answers)
    with drafting(engine, oracle, MAX_DRAFTS) as speculation:
        found, found_events = asked(http, name)
        server.wait_until_idle()
    assert found == whole
    assert added_up(found_events) == added_up(events)
    assert speculation.counts.num_accepted_tokens > oracle.num_steps
    if name in ENDING:
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert oracle.reach > whole["usage"]["completion_tokens"]
