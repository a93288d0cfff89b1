"""Tools and reasoning on the chat endpoint: what a scripted model says, as messages, whole and streamed alike."""

import contextlib
import json

import openai
import pytest
import tokenizers
from starlette.testclient import TestClient

from jaxis import SamplingParams
from jaxis.engine.async_engine import EngineStats
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.server.app import create_app
from jaxis.server.config import ServerConfig
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.config import TokenizerConfig

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if message.tool_call_id %}(for {{ message.tool_call_id }}){% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% endif %}
"""
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


class ScriptedEngine:
    """Says one text, a few characters a step, whatever it is asked."""

    def __init__(self, template=TEMPLATE):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
        self.tokenizer = Tokenizer(backend, TokenizerConfig(chat_templates={"default": template}))
        self.default_sampling_params = SamplingParams(max_tokens=None)
        self.max_model_len, self.model_type = 1000, None
        self.is_accepting = self.is_making_progress = True
        self.text, self.finish_reason, self.piece = "", "stop", 3
        self.prompt = self.params = None

    def start(self):
        pass

    async def shutdown(self):
        pass

    def stats(self):
        return EngineStats()

    def reserve(self, num_sequences):
        return contextlib.nullcontext()

    async def generate(self, prompt, params, request_id, *, final_only=False, **_):
        self.prompt, self.params = prompt.text, params
        size = max(1, len(self.text)) if final_only else self.piece
        pieces = [self.text[at : at + size] for at in range(0, len(self.text), size)] or [""]
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            completions = [
                CompletionOutput(index, piece, [0], finish_reason=self.finish_reason if last else None)
                for index in range(params.n)
            ]
            yield RequestOutput(request_id, prompt.text, [0], None, completions, last)


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def connect():
    """Makes an `openai` client of a server over an engine."""
    with contextlib.ExitStack() as stack:

        def open_client(engine, **settings):
            app = create_app(engine, ServerConfig(**settings))
            http = stack.enter_context(TestClient(app, base_url="http://testserver"))
            return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)

        yield open_client


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


def test_a_call_alone_has_no_content(client, engine):
    engine.text = CALLS
    assert both(client, tools=[WEATHER], parallel_tool_calls=False)[::2] == (
        None,
        [("get_weather", '{"city": "Paris"}')],
    )


def test_a_cut_call_is_a_cut_answer(client, engine):
    engine.text, engine.finish_reason = '<tool_call>{"name": "get_weather", "arguments": {"ci', "length"
    assert both(client, tools=[WEATHER])[2:] == ([("get_weather", '{"ci')], "length")


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_the_text_stays(client, engine, more):
    engine.text = CALLS
    assert both(client, **more) == (CALLS, None, [], "stop")
    assert "get_weather" not in engine.prompt


def test_required_is_a_schema_over_all_tools(client, engine):
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
    engine.text = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    choice = {"type": "function", "function": {"name": "get_weather"}}
    assert both(client, tools=[TIME, WEATHER], tool_choice=choice)[::2] == (None, [("get_weather", '{"city": "Rome"}')])
    schema = engine.params.structured_outputs.json_schema
    assert schema["maxItems"] == 1
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["get_weather"]


def test_reasoning_is_apart_and_can_be_left_out(client, engine):
    engine.text = "<think>\nLet me see.\n</think>\n\nSunny."
    assert both(client) == ("Sunny.", "Let me see.", [], "stop")
    assert both(client, extra_body={"include_reasoning": False}) == ("Sunny.", None, [], "stop")


def test_a_template_may_open_the_reasoning(connect):
    engine = ScriptedEngine(TEMPLATE.replace("[assistant]", "[assistant]<think>"))
    engine.text = "Let me see.</think>Sunny."
    assert both(connect(engine))[:2] == ("Sunny.", "Let me see.")


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


def call_with(arguments):
    function = {"name": "get_time", "arguments": arguments}
    return [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": call_with("{")}, "messages"),
        ({"messages": call_with("[1]")}, "messages"),
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
