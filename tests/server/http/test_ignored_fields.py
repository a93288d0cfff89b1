"""Fields that are not applied: accepted and named where they change nothing, otherwise refused."""

import openai
import pytest

from jaxis.errors import RequestError
from jaxis.server.http.errors import RefusedFieldError, api_error
from jaxis.server.http.ignored_fields import MAX_UNKNOWN_FIELDS, IgnoredFields, ignored_fields
from jaxis.server.openai.chat_schema import ChatCompletionRequest
from jaxis.server.openai.completions import CompletionRequest
from jaxis.server.openai.response_schema import ResponseRequest
from tests.support.scripted_engine import ScriptedEngine, connected

MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = [{"type": "text", "text": "a"}]
BASES = {
    ChatCompletionRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "Hi"},
    ResponseRequest: {"input": "Hi"},
}


def request(model=ChatCompletionRequest, /, **fields):
    return model.model_validate({**BASES[model], **fields})


@pytest.mark.parametrize("model", BASES)
def test_neutral_values_ask_for_nothing(model):
    fields = {"length_penalty": 1.0, "use_beam_search": False, "store": False, "service_tier": "auto", "grammar": ""}
    if model is ChatCompletionRequest:
        fields |= {"functions": [], "function_call": "auto", "best_of": 1}
    assert ignored_fields(request(model, **fields)) == []


@pytest.mark.parametrize("model", BASES)
def test_null_is_as_absent_for_every_optional_field(model):
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    nulls = dict.fromkeys(optional | model.not_applied.keys() | {"of_a_later_release"})
    with_nulls, without = request(model, **nulls), request(model)
    assert ignored_fields(with_nulls) == []
    # A default that is not null has a meaning of its own, which null must have too.
    assert {name: getattr(with_nulls, name) for name in optional} == {name: getattr(without, name) for name in optional}


@pytest.mark.parametrize("model", BASES)
def test_what_cannot_change_the_answer_is_named(model):
    fields = {"of_a_later_release": {"a": [1]}, "store": True, "user": "me", "service_tier": "flex"}
    expected = ["of_a_later_release", "service_tier", "store", "user"]
    if model is ResponseRequest:
        expected.remove("store")  # these are stored
    assert ignored_fields(request(model, **fields)) == expected


def test_ignored_names_inside_messages_and_tools_are_listed_once():
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        *({"role": "user", "content": "b", "id": f"m{i}", "cache_control": None} for i in range(1000)),
    ]
    tools = [{"type": "function", "function": {"name": "f", "origin": "x"}, "cache_control": {}}]
    body = request(messages=messages, tools=tools)
    assert ignored_fields(body) == [
        "messages.content.cache_control",
        "messages.id",
        "tools.cache_control",
        "tools.function.origin",
    ]
    # None of it gets into the prompt.
    assert body.tools[0].model_dump(exclude_unset=True) == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "advice"),
    [
        ({"length_penalty": 0.5}, "length_penalty", "beam search"),
        ({"functions": [{"name": "f"}]}, "functions", "send tools"),
        ({"max_new_tokens": 5}, "max_new_tokens", "send max_tokens"),
        ({"thinking_budget_tokens": 0}, "thinking_budget_tokens", "send thinking_token_budget"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning", "send reasoning_effort"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"Max_Tokens": 1}, "Max_Tokens", "did you mean max_tokens"),
        ({"messages": [{**MESSAGES[0], "prefix": True}]}, "messages", "continue_final_message"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [*TEXT, {**TEXT[0], "Text": "b"}]}]},
            "messages",
            r"messages\[1\].content\[1\].Text is not a known parameter: did you mean text",
        ),
        ({"messages": [{**MESSAGES[0], "images": ["x"]}]}, "messages", "send parts of type image_url"),
        ({f"unknown_{i}": 1 for i in range(MAX_UNKNOWN_FIELDS + 1)}, f"unknown_{MAX_UNKNOWN_FIELDS}", "more than"),
    ],
)
def test_what_changes_the_answer_is_refused_with_advice(fields, param, advice):
    with pytest.raises(RefusedFieldError, match=advice) as caught:
        ignored_fields(request(**fields))
    assert api_error(caught.value).param == param
    assert "\n" not in str(caught.value)


def test_other_names_of_thinking_budgets_are_refused():
    assert ignored_fields(request(thinking_budget=-1)) == []
    with pytest.raises(RefusedFieldError, match=r"reasoning\.max_tokens other than -1 cannot be honoured"):
        ignored_fields(request(ResponseRequest, reasoning={"max_tokens": 500}))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "x": 1}},
        {"structured_outputs": {"regex": "a", "x": 1}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
    ],
)
def test_names_inside_schemas_and_choices_are_never_ignored(fields):
    with pytest.raises(ValueError, match="x"):
        request(**fields)


def test_strict_refuses_unknown_names_and_no_others():
    assert ignored_fields(request(user="me"), strict=True) == ["user"]
    for fields in ({"of_a_later_release": None}, {"messages": [{**MESSAGES[0], "id": "m"}]}):
        with pytest.raises(RequestError, match="is not a known parameter"):
            ignored_fields(request(**fields), strict=True)


def test_the_log_names_a_field_once_and_on_one_line(monkeypatch):
    logged = []
    # Not by caplog: what other tests set up of the log would have a say.
    monkeypatch.setattr("jaxis.server.http.ignored_fields._logger.info", lambda _text, name: logged.append(name))
    fields = IgnoredFields()
    for _ in range(3):
        headers = fields.check(request(user="me", **{"a\nb, c": 1}), ["tools.web_search", "tools.\r\nX: é"])
    assert headers == {"X-Jaxis-Ignored": "a?b??c,user,tools.web_search,tools.??X???"}
    assert logged == ["a?b??c", "user", "tools.web_search", "tools.??X???"]


def test_the_log_names_the_field_that_is_most_like_an_unknown_one(monkeypatch):
    logged = []
    monkeypatch.setattr(
        "jaxis.server.http.ignored_fields._logger.warning", lambda text, *names: logged.append(text % names)
    )
    fields = IgnoredFields()
    for _ in range(2):
        headers = fields.check(request(topk=5, messages=[{**MESSAGES[0], "origin": "b"}]))
    assert headers == {"X-Jaxis-Ignored": "messages.origin,topk"}
    assert logged == ["requests carry topk, which has no effect here: did you mean top_k?"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_ignored_fields(stream):
    engine = ScriptedEngine()
    engine.text = "Yes."
    with connected(engine) as client:
        create = client.chat.completions.with_raw_response.create
        chat = create(
            model="jaxis-tiny", messages=MESSAGES, store=True, stream=stream, extra_body={"later": 1, "functions": []}
        )
        assert chat.headers["x-jaxis-ignored"] == "later,store"
        text = client.completions.with_raw_response.create(model="jaxis-tiny", prompt="Hi", stream=stream)
        assert "x-jaxis-ignored" not in text.headers
        answer = client.responses.with_raw_response.create(
            model="jaxis-tiny", input="Hi", stream=stream, truncation="auto", tools=[{"type": "web_search"}]
        )
        assert answer.headers["x-jaxis-ignored"] == "truncation,tools.web_search"
    with connected(engine, strict_fields=True) as client, pytest.raises(openai.BadRequestError, match="later"):
        client.chat.completions.create(model="jaxis-tiny", messages=MESSAGES, extra_body={"later": 1})


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "string", "format": "iri"}},
}
FUNCTION = {"name": "f", "strict": True, "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "name": "s", "schema": SCHEMA}
OF_SCHEMA = "{0}.format.iri,{0}.uniqueItems"
# Path, fields of the body, and the header.
CONSTRAINED = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "user": "me",
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
        f"user,{OF_SCHEMA.format('response_format.json_schema.schema')}",
    ),
    "strict tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        OF_SCHEMA.format("tools"),
    ),
    "demanded tools": (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        OF_SCHEMA.format("tools"),
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "text": {"format": FORMAT}},
        OF_SCHEMA.format("text.format.schema"),
    ),
    "ollama": ("/api/chat", {"messages": MESSAGES, "format": SCHEMA}, OF_SCHEMA.format("format")),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CONSTRAINED)
def test_a_header_names_keywords_of_a_schema_that_answers_are_not_held_to(name, stream):
    path, body, header = CONSTRAINED[name]
    engine = ScriptedEngine()
    engine.text = "{}"
    with connected(engine) as client:
        for _ in range(2):  # the second time, the grammar is there
            response = client.http.post(path, json={"model": "jaxis-tiny", "stream": stream, **body})
            assert response.status_code == 200, response.text
            assert response.headers["x-jaxis-ignored"] == header
