"""Answers that match a given grammar from the embedded model, through the `openai` client."""

import json
import re

import jsonschema
import openai
import pydantic
import pytest

MODEL = "jaxis-tiny"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "parameters": CITY}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"$ref": "#/$defs/Zone"}}}}
TIME["parameters"] |= {"$defs": {"Zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    is_capital: bool


def ask(client, **more):
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 300} | more)


def text(client, **more):
    [choice] = ask(client, **more).choices
    assert choice.finish_reason == "stop"
    return choice.message.content


def test_a_pydantic_model_is_parsed(client):
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=120)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_response_formats(client):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    jsonschema.validate(json.loads(text(client, response_format=schema)), CITY)
    braces = [{"role": "user", "content": "{}"}]  # which this model answers with a short object
    assert isinstance(json.loads(text(client, response_format={"type": "json_object"}, messages=braces)), dict)
    assert "Paris" in text(client, response_format={"type": "text"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[0-9]{3}-[a-f]{2}", "[0-9]{3}-[a-f]{2}"),
        ("choice", ["Madrid", "Lisbon"], "Madrid|Lisbon"),
        ("grammar", 'start: "<" /[a-c]{4}/ ">"', "<[a-c]{4}>"),
        ("json", {"const": 7, "type": "integer"}, "7"),
    ],
)
def test_vllms_fields(client, kind, value, pattern):
    for extra in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        assert re.fullmatch(pattern, text(client, extra_body=extra))
        completion = client.completions.create(model=MODEL, prompt="x", max_tokens=50, extra_body=extra)
        assert re.fullmatch(pattern, completion.choices[0].text)


def test_a_form_streams_as_it_is_whole(client):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    chunks = ask(client, response_format=schema, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(client, response_format=schema)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "get_time"}), ({"type": "function", "function": {"name": "get_time"}}, {"get_time"})],
)
def test_demanded_calls_have_valid_arguments(client, choice, names):
    answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert call.function.name in names
    parameters = next(f["parameters"] for f in (WEATHER, TIME) if f["name"] == call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), parameters)
    streamed = {"name": "", "arguments": ""}
    for chunk in ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            streamed["name"] += delta.function.name or ""
            streamed["arguments"] += delta.function.arguments or ""
    assert streamed == {"name": call.function.name, "arguments": call.function.arguments}


def test_the_model_may_call_by_itself(client):
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    weather = [{"role": "user", "content": "Weather in Paris?"}]
    [choice] = ask(client, messages=weather, tools=tools).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    [choice] = ask(client, messages=MESSAGES, tools=tools).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "Paris" in choice.message.content


def test_an_answer_has_its_form_or_calls(client):
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    both = {"tools": [{"type": "function", "function": {"name": "get_weather"}}], "response_format": schema}
    [choice] = ask(client, messages=[{"role": "user", "content": "Weather in Paris?"}], **both).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": "Paris"})
    [choice] = ask(client, **both).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    jsonschema.validate(json.loads(choice.message.content), CITY)


def test_strict_calls_fit_their_schema_and_others_need_not(client):
    schema = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    weather = [{"role": "user", "content": "Weather in Paris?"}]
    for strict in (True, False):
        function = {"name": "get_weather", "strict": strict, "parameters": schema | {"additionalProperties": False}}
        [choice] = ask(client, messages=weather, tools=[{"type": "function", "function": function}]).choices
        [call] = choice.message.tool_calls
        assert (json.loads(call.function.arguments) == {"zone": "UTC"}) is strict
    [choice] = ask(
        client, messages=MESSAGES, tools=[{"type": "function", "function": function | {"strict": True}}]
    ).choices
    assert "Paris" in choice.message.content


def test_responses_take_forms_and_functions(client):
    form = {"type": "json_schema", "name": "city", "schema": CITY}
    response = client.responses.create(
        model=MODEL, input="Hi", text={"format": form}, max_output_tokens=120, extra_body={"seed": 1}
    )
    jsonschema.validate(json.loads(response.output_text), CITY)
    function = {"type": "function", "strict": True, **TIME}
    response = client.responses.create(
        model=MODEL, input="Hi", tools=[function], tool_choice="required", parallel_tool_calls=False
    )
    [call, *_] = response.output
    assert (call.type, call.name, call.status) == ("function_call", "get_time", "completed")
    jsonschema.validate(json.loads(call.arguments), TIME["parameters"])


def test_a_bad_form_fails_its_own_request_only(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={"guided_regex": "(" * 3})
    assert caught.value.body["param"] == "guided_regex"
    assert "guided_regex" in caught.value.body["message"]
    assert "Paris" in text(client)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "guided_regex"),
        ({"extra_body": {"guided_grammar": "start: nothing"}}, "guided_grammar"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.body["param"] == param
    assert "\n" not in caught.value.body["message"]
