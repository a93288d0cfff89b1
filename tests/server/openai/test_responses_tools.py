"""/v1/responses with functions, reasoning and log-probabilities: items, events, and their way back."""

import json
import re

import openai
import pytest

from tests.support.scripted_engine import ScriptedEngine, connected

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}
ANSWER = (
    "<think>\nhm\n</think>\n\nI look."
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
)


@pytest.fixture
def scripted():
    return ScriptedEngine()


@pytest.fixture
def scripted_client(scripted):
    with connected(scripted) as client:
        yield client


def ask(client, **more):
    return client.responses.create(**{"model": "jaxis-tiny", "input": "Weather?"} | more)


def said(output):
    """Items without their ids, which are all different."""
    ids = [item.id for item in output] + [item.call_id for item in output if item.type == "function_call"]
    assert len(set(ids)) == len(ids)
    return [
        (item.type, item.status, item.name, json.loads(item.arguments))
        if item.type == "function_call"
        else (item.type, item.status, "".join(part.text for part in item.content))
        for item in output
    ]


EXPECTED = [
    ("reasoning", "completed", "hm"),
    ("message", "completed", "I look."),
    ("function_call", "completed", "get_weather", {"city": "Rome"}),
    ("function_call", "completed", "get_weather", {"city": "Oslo"}),
]


def test_items(scripted, scripted_client):
    scripted.text = ANSWER
    response = ask(scripted_client, tools=[WEATHER])
    assert said(response.output) == EXPECTED
    assert (response.status, response.tools[0].name, response.tool_choice) == ("completed", "get_weather", "auto")
    scripted.text = "<think>hm"
    scripted.finish_reason = "length"
    response = ask(scripted_client)
    assert (said(response.output), response.status) == ([("reasoning", "incomplete", "hm")], "incomplete")


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_events_build_the_items(scripted, scripted_client, piece):
    scripted.text, scripted.piece = ANSWER, piece
    events = list(ask(scripted_client, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts, items, opened = {}, {}, None
    for event in events:
        match event.type.removeprefix("response."):
            case "output_item.added":
                assert opened is None
                assert event.item.status == "in_progress"
                assert event.output_index == len(items)
                opened = event.item
                texts[opened.id] = ""
            case "reasoning_text.delta" | "output_text.delta" | "function_call_arguments.delta":
                texts[event.item_id] += event.delta
            case "reasoning_text.done" | "output_text.done":
                assert event.text == texts[event.item_id]
            case "function_call_arguments.done":
                assert event.arguments == texts[event.item_id]
            case "output_item.done":
                assert event.item.id == opened.id
                items[event.output_index] = event.item
                opened = None
    assert said(items.values()) == EXPECTED
    assert events[-1].type == "response.completed"
    assert said(events[-1].response.output) == EXPECTED
    assert list(texts.values()) == ["hm", "I look.", '{"city": "Rome"}', '{"city": "Oslo"}']


@pytest.mark.parametrize("as_dicts", [False, True])
def test_items_come_back_as_one_turn(scripted, scripted_client, as_dicts):
    scripted.text = ANSWER
    output = ask(scripted_client, tools=[WEATHER]).output
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
        for item in output
        if item.type == "function_call"
    ]
    given = [item.model_dump() for item in output] if as_dicts else output
    ask(scripted_client, input=[{"role": "user", "content": "Weather?"}, *given, *results], tools=[WEATHER])
    turn = scripted.prompt[scripted.prompt.index("[assistant]") :]
    call = '<tool_call>{{"name": "get_weather", "arguments": {{"city": "{}"}}}}</tool_call>'
    assert turn == (
        f"[assistant]<think>hm</think>I look.{call.format('Rome')}{call.format('Oslo')}"
        + "".join(f"[tool]sun(for {result['call_id']})" for result in results)
        + "[assistant]"
    )


def test_other_names_reach_the_chat(scripted, scripted_client):
    scripted.text = "Hi"
    ask(scripted_client, tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    assert "get_weather" in scripted.params.structured_outputs.grammar
    ask(scripted_client, reasoning={"effort": "low"}, max_output_tokens=7)
    assert scripted.prompt.rstrip().endswith("<low>")
    assert scripted.params.max_tokens == 7


def test_logprobs(client):
    include = ["message.output_text.logprobs"]
    ask_for = {"input": "What is the capital of France?", "include": include, "top_logprobs": 2}
    [item] = ask(client, **ask_for).output
    chat = client.chat.completions.create(
        model="jaxis-tiny",
        messages=[{"role": "user", "content": ask_for["input"]}],
        logprobs=True,
        top_logprobs=2,
    )
    expected = [(p.token, [top.token for top in p.top_logprobs]) for p in chat.choices[0].logprobs.content]
    assert [(p.token, [top.token for top in p.top_logprobs]) for p in item.content[0].logprobs] == expected
    events = list(ask(client, **ask_for, stream=True))
    parts = [p for event in events if event.type == "response.output_text.delta" for p in event.logprobs]
    assert [(p.token, [top.token for top in p.top_logprobs]) for p in parts] == expected[: len(parts)]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [(p.token, [top.token for top in p.top_logprobs]) for p in done.logprobs] == expected


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}, "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(scripted_client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(scripted_client, **more)
    assert caught.value.body["param"] == param


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", 'start: "+" /[a-z]{2,5}/ LF\n%import common.LF\n'), ("regex", r"\+[a-z]{2,5}\n")],
)
def test_the_input_of_a_custom_tool_follows_its_grammar(client, syntax, definition):
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    choice = {"type": "custom", "name": "edit"}
    response = ask(client, input="Edit it.", tools=[tool], tool_choice=choice, max_output_tokens=100)
    [item] = response.output
    assert (item.type, item.name, item.status) == ("custom_tool_call", "edit", "completed")
    assert re.fullmatch(r"\+[a-z]{2,5}\n", item.input)
    assert response.tools[0].format.definition == definition


def test_a_grammar_that_is_none_is_refused(client):
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.format\.definition cannot be honoured") as caught:
        ask(client, tools=[tool], tool_choice={"type": "custom", "name": "edit"})
    assert caught.value.body["param"] == "tools"


def test_cached_tokens_are_in_the_usage(client):
    first = ask(client, input="The capital of France is a city that everybody knows, is it not?", max_output_tokens=1)
    second = ask(client, input="The capital of France is a city that everybody knows, is it not?", max_output_tokens=1)
    assert second.usage.input_tokens == first.usage.input_tokens
    assert 0 < second.usage.input_tokens_details.cached_tokens < second.usage.input_tokens
