"""Tools and reasoning on the chat endpoint: what a scripted model says, as messages, whole and streamed alike."""

import contextlib
import json

import openai
import pytest

from jaxis.engine.grammar.token_mask import is_allowed
from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template
from tests.parsing.tool_call_formats import FORMATS
from tests.support.scripted_engine import TEMPLATE, ScriptedEngine, connected

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def connect():
    """Makes clients that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(connected(engine, **settings))


@pytest.fixture
def client(connect, engine):
    return connect(engine)


def ask(client, **more):
    return client.chat.completions.create(**{"model": "jaxis-tiny", "messages": MESSAGES} | more)


def streamed(client, **more):
    """A stream's chunks added up to a message, with the finish reason."""
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": {}}, None
    for chunk in ask(client, stream=True, **more):
        [choice] = chunk.choices
        assert reason is None
        reason = choice.finish_reason
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index not in message["tool_calls"]:
                assert (call.type, call.index) == ("function", len(message["tool_calls"]))
                message["tool_calls"][call.index] = {"id": call.id, "name": call.function.name, "arguments": ""}
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return message, reason


def both(client, **more):
    """An answer's content, reasoning, calls and finish reason, seen to be the same whole and streamed."""
    [choice] = ask(client, **more).choices
    message = choice.message
    reasoning = getattr(message, "reasoning_content", None)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    ids = [call.id for call in message.tool_calls or []]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    other, reason = streamed(client, **more)
    assert (other["content"] or None, other["reasoning_content"] or None) == (message.content or None, reasoning)
    assert [(call["name"], call["arguments"]) for call in other["tool_calls"].values()] == calls
    assert reason == choice.finish_reason
    return message.content, reasoning, calls, reason


def test_calls_are_parsed(client, engine):
    engine.text = f"I look.\n{CALLS}"
    content, _, calls, reason = both(client, tools=[WEATHER, TIME])
    assert (content, reason) == ("I look.", "tool_calls")
    assert calls == [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]
    assert json.dumps(WEATHER) in engine.prompt
    assert engine.params.structured_outputs is None


@pytest.mark.parametrize("piece", [1, 2, 7, 50, 1000])
def test_calls_come_through_any_split(client, engine, piece):
    engine.text, engine.piece = f"<think>\nhm\n</think>\n\nI look.\n{CALLS}", piece
    assert both(client, tools=[WEATHER, TIME])[1:] == (
        "hm",
        [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")],
        "tool_calls",
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_comes_through(connect, engine, name):
    form = FORMATS[name]
    arguments = {"city": 'Köln "x"\nNord'}
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "functions.get_weather:0", "function": function}]}
    turn |= {"reasoning_content": "hm"} if form.reasoning else {}
    messages = with_template_arguments([{"role": "user", "content": "?"}, turn], form.template)
    rendered = render_chat_template(form.template, messages, add_generation_prompt=False)
    engine.text = rendered.removeprefix("USER")
    client = connect(engine, tool_call_parser=form.tool, reasoning_parser=form.reasoning or "none")
    content, reasoning, [(called, given)], reason = both(client, tools=[WEATHER])
    assert (content, reasoning, called, reason) == (None, "hm" if form.reasoning else None, "get_weather", "tool_calls")
    assert json.loads(given) == arguments


def test_a_call_alone_has_no_content(client, engine):
    engine.text = CALLS
    assert both(client, tools=[WEATHER], parallel_tool_calls=False)[::2] == (
        None,
        [("get_weather", '{"city": "Paris"}')],
    )


def test_the_one_call_may_follow_a_malformed_one(client, engine):
    malformed = '<tool_call>{"name": "get_time", "arguments": {"zone": ]}}</tool_call>'
    engine.text = f"{malformed}\n{CALLS}"
    [choice] = ask(client, tools=[WEATHER, TIME], parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert (choice.message.content, choice.finish_reason) == (malformed, "tool_calls")
    message, _ = streamed(client, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert message["content"] == malformed
    assert [call["name"] for call in message["tool_calls"].values()][-1] == "get_weather"


@pytest.mark.parametrize("settings", [{}, {"tool_strictness": "always"}])
def test_a_tool_that_cannot_be_strict_is_named(connect, engine, settings):
    schema = {"type": "object", "properties": {"zone": {"type": "string", "not": {"const": "x"}}}}
    bad = {"type": "function", "function": {"name": "get_zone", "strict": True, "parameters": schema}}
    client = connect(engine, tool_call_parser="qwen3_coder", **settings)
    words = r"tools\[1\].function.parameters of 'get_zone' cannot be strict: .* not of a string"
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, tools=[WEATHER, bad])


def test_a_cut_call_is_a_cut_answer(client, engine):
    engine.text, engine.finish_reason = '<tool_call>{"name": "get_weather", "arguments": {"ci', "length"
    assert both(client, tools=[WEATHER])[2:] == ([("get_weather", '{"ci')], "length")


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_the_text_stays(client, engine, more):
    engine.text = CALLS
    assert both(client, **more) == (CALLS, None, [], "stop")
    assert "get_weather" not in engine.prompt


def test_calls_that_must_come_are_in_the_models_format(client, engine):
    engine.text = (
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    )
    assert both(client, tools=[WEATHER, TIME], tool_choice="required") == (
        None,
        None,
        [("get_time", "{}"), ("get_weather", '{"city": "Rome"}')],
        "tool_calls",
    )
    grammar = engine.params.structured_outputs.grammar
    assert all(part in grammar for part in ('"const": "get_time"', '"const": "get_weather"', '"<tool_call>\\n"'))


def test_calls_in_no_known_format_are_a_list(connect, engine):
    client = connect(engine, tool_call_parser="none")
    engine.text = '[{"name": "get_time", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Rome"}}]'
    assert both(client, tools=[WEATHER, TIME], tool_choice="required") == (
        None,
        None,
        [("get_time", "{}"), ("get_weather", '{"city": "Rome"}')],
        "tool_calls",
    )
    schema = engine.params.structured_outputs.json_schema
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert engine.params.structured_outputs.json_schema["maxItems"] == 1


def test_a_named_function_gets_its_arguments(client, engine):
    engine.text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    choice = {"type": "function", "function": {"name": "get_weather"}}
    assert both(client, tools=[TIME, WEATHER], tool_choice=choice)[::2] == (None, [("get_weather", '{"city": "Rome"}')])
    grammar = engine.params.structured_outputs.grammar
    assert "get_weather" in grammar
    assert "get_time" not in grammar


def test_reasoning_is_apart_and_can_be_left_out(client, engine):
    engine.text = "<think>\nLet me see.\n</think>\n\nSunny."
    assert both(client) == ("Sunny.", "Let me see.", [], "stop")
    assert both(client, extra_body={"include_reasoning": False}) == ("Sunny.", None, [], "stop")


def test_tokens_of_reasoning_are_counted(connect):
    engine = ScriptedEngine(tags=["<think>", "</think>"])
    engine.text = "<think>hm</think>Hi"
    client = connect(engine)
    whole = ask(client, n=2).usage
    *_, streamed = ask(client, n=2, stream=True, stream_options={"include_usage": True})
    for usage in (whole, streamed.usage):
        assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (12, 8)
    usage = client.responses.create(model="jaxis-tiny", input="x").usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (6, 4)


def test_a_template_may_open_the_reasoning(connect):
    engine = ScriptedEngine(TEMPLATE.replace("[assistant]", "[assistant]<think>"))
    engine.text = "Let me see.</think>Sunny."
    assert both(connect(engine))[:2] == ("Sunny.", "Let me see.")


def test_a_form_holds_after_reasoning_whose_marks_are_no_tokens(connect):
    """And from the beginning where nothing tells that the model will open any."""
    engine = ScriptedEngine(TEMPLATE)
    engine.text = '{"a": 1}'
    assert both(connect(engine), response_format={"type": "json_object"}) == ('{"a": 1}', None, [], "stop")
    assert engine.grammar.new_matcher().token_mask().any()
    engine = ScriptedEngine(TEMPLATE.replace("[assistant]", "[assistant]<think>"))
    engine.text = 'Hm.</think>{"a": 1}'
    assert both(connect(engine), response_format={"type": "json_object"}) == ('{"a": 1}', "Hm.", [], "stop")
    matcher = engine.grammar.new_matcher()
    token_ids = engine.tokenizer.encode(engine.text)
    for count, token_id in enumerate(token_ids):
        matcher.follow(token_ids[:count])
        assert is_allowed(matcher.token_mask(), token_id)
    after = engine.tokenizer.encode("Hm.</think>")
    matcher = engine.grammar.new_matcher()
    matcher.follow(after)
    assert not is_allowed(matcher.token_mask(), engine.tokenizer.encode("H")[0])


def test_reasoning_effort_is_the_templates(client, connect, engine):
    ask(client, reasoning_effort="low")
    assert engine.prompt.strip().endswith("[assistant]<low>")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(connect(ScriptedEngine("{{ messages }}")), reasoning_effort="low")
    assert caught.value.body["param"] == "reasoning_effort"


def test_none_leaves_texts_alone(connect, engine):
    engine.text = f"<think>hm</think>{CALLS}"
    client = connect(engine, tool_call_parser="none", reasoning_parser="none")
    assert both(client, tools=[WEATHER]) == (engine.text, None, [], "stop")


def test_an_answer_with_calls_comes_back(client, engine):
    engine.text = f"<think>hm</think>{CALLS}"
    message = ask(client, tools=[WEATHER, TIME]).choices[0].message
    tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny"}
    ask(client, messages=[*MESSAGES, message.model_dump(), tool], tools=[WEATHER, TIME])
    rendered = engine.prompt
    assert "[assistant]<think>hm</think>" in rendered
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>' in rendered
    assert f"[tool]Sunny(for {message.tool_calls[0].id})" in rendered


def test_several_answers_are_read_apart(client, engine):
    engine.text = CALLS
    answer = ask(client, tools=[WEATHER, TIME], n=2)
    assert [[call.function.name for call in choice.message.tool_calls] for choice in answer.choices] == [
        ["get_weather", "get_time"]
    ] * 2
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls}) == 4


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TIME], "extra_body": {"guided_regex": "a+"}}, "guided_regex"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.body["param"] == param
    assert "\n" not in caught.value.body["message"]


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }}{{ tools }}"])
def test_a_model_that_knows_no_tools_refuses_them(connect, template):
    with pytest.raises(openai.BadRequestError, match="template"):
        ask(connect(ScriptedEngine(template)), tools=[TIME])


def test_calls_and_answers_of_the_form_before_tools_come_back(client, engine):
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{"}},
        {"role": "function", "name": "get_weather", "content": "error"},
        {"role": "assistant", "content": "Once more.", "function_call": {"name": "get_time", "arguments": ""}},
        {"role": "function", "name": "get_time", "content": "noon"},
    ]
    ask(client, messages=history)
    assert engine.prompt == (
        "[user]Weather in Paris?"
        '[assistant]<tool_call>{"name": "get_weather", "arguments": {"arguments": "{"}}</tool_call>'
        "[tool]error(for call00001)"
        '[assistant]Once more.<tool_call>{"name": "get_time", "arguments": {}}</tool_call>[tool]noon(for call00003)'
        "[assistant]"
    )


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "refusal", "refusal": "I can't."}]},
        {"content": None, "refusal": "I can't."},
        {"content": "I can't.", "refusal": None},
    ],
)
def test_what_a_model_refused_with_is_what_it_said(client, engine, said):
    ask(client, messages=[*MESSAGES, {"role": "assistant", **said}, {"role": "user", "content": "Why?"}])
    assert engine.prompt == "[user]Weather in Paris?[assistant]I can't.[user]Why?[assistant]"
    if isinstance(said["content"], list):
        item = {"type": "message", "role": "assistant", **said}
        client.responses.create(model="jaxis-tiny", input=[*MESSAGES, item, {"role": "user", "content": "Why?"}])
        assert engine.prompt == "[user]Weather in Paris?[assistant]I can't.[user]Why?[assistant]"
