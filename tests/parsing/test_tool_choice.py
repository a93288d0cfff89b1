import json

import jsonschema
import llguidance
import pytest

from jaxis.errors import RequestError
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.tool_choice import plan_tools, required_tools_schema
from jaxis.parsing.tool_parsers.tools import FunctionTool, function_tools
from jaxis.tokenizer.chat_messages import check_tool_arguments, with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template

TREE = FunctionTool(
    "tree",
    parameters={
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/tree",
        "type": "object",
        "properties": {
            "root": {"$ref": "#/$defs/node"},
            "default": {"$ref": "#/$defs/node"},
            "how": {"enum": ["bfs", {"$ref": "#/a"}]},
        },
        "required": ["root"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
)
NOW = FunctionTool("now")
TREE_CALL = {"name": "tree", "parameters": {"root": {"left": {"value": 2}, "value": 1}, "how": {"$ref": "#/a"}}}


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([TREE_CALL], True),
        ([TREE_CALL, {"name": "now", "parameters": {}}], True),
        ([], False),
        ([{"name": "now"}], False),
        ([{"name": "other", "parameters": {}}], False),
        ([{"name": "tree", "parameters": {}}], False),
        ([{"name": "tree", "parameters": {"root": {"value": "1"}}}], False),
        ([{"name": "tree", "parameters": {"root": {"value": 1, "left": {"value": None}}}}], False),
        ([{"name": "tree", "parameters": {"root": {"value": 1}, "default": {"value": "1"}}}], False),
    ],
)
def test_the_schema_of_required_calls_holds_the_schemas_of_the_functions(calls, valid):
    schema = required_tools_schema([NOW, TREE])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) is valid


@pytest.mark.parametrize(
    ("calls", "valid"),
    [
        ([TREE_CALL, TREE_CALL], True),
        ([{"name": "now", "parameters": {}}], True),
        ([TREE_CALL] * 3, False),
        ([{"name": "tree", "parameters": {"root": {"value": "1"}}}], False),
    ],
)
def test_a_grammar_of_the_schema_takes_such_calls_only(calls, valid):
    schema = required_tools_schema([NOW, TREE], max_calls=2)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    tokens = tokenizer.tokenize_str(json.dumps(calls))
    assert (matcher.validate_tokens(tokens) == len(tokens)) is valid


def test_a_required_answer_is_read_as_calls():
    plan = plan_tools([NOW, TREE], "required")
    output = parse_output(OutputParser(plan.parser, None, tools=plan.tools), json.dumps([TREE_CALL, TREE_CALL]))
    assert output.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == [
        ("tree", TREE_CALL["parameters"])
    ] * 2


def test_plans_say_what_each_choice_needs():
    tools = (NOW, TREE)
    assert (plan_tools(()).mode, plan_tools(tools).mode, plan_tools(tools, "none").mode) == ("none", "auto", "none")
    assert plan_tools(tools, "none").tools == ()
    assert plan_tools(tools).json_schema is None
    assert plan_tools(tools).tools == tools
    assert "maxItems" not in plan_tools(tools, "required").json_schema
    assert plan_tools(tools, "required", parallel_tool_calls=False).json_schema["maxItems"] == 1
    named = plan_tools(tools, {"type": "function", "function": {"name": "tree"}})
    assert named.mode == "named"
    assert named.tools == tools
    assert jsonschema.Draft202012Validator(named.json_schema).is_valid([TREE_CALL])
    assert not jsonschema.Draft202012Validator(named.json_schema).is_valid([{"name": "now", "parameters": {}}])
    assert not jsonschema.Draft202012Validator(named.json_schema).is_valid([TREE_CALL, TREE_CALL])


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ((), "required", "tools is empty"),
        ((NOW,), "always", "tool_choice must be"),
        ((NOW,), {"type": "function"}, "tool_choice must be"),
        ((NOW,), {"type": "function", "function": {"name": "tree"}}, "tool_choice names 'tree', which is not in tools"),
    ],
)
def test_choices_that_cannot_be_are_refused(tools, choice, message):
    with pytest.raises(RequestError, match=message):
        plan_tools(tools, choice)


def test_tools_are_read_as_they_were_sent():
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    (f,) = function_tools([tool(description="Does.", parameters=parameters, strict=True)])
    assert f == FunctionTool("f", "Does.", parameters, strict=True)
    (g,) = function_tools([tool()])
    assert g.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([tool()] * 129, "tools holds 129 functions; send 128 at most"),
        ([tool(), tool()], r"tools\[1\].function.name 'f' is taken"),
        ([tool(name="a b")], r"tools\[0\].function.name must be"),
        ([tool(name="f" * 129)], r"tools\[0\].function.name must be"),
        ([{"type": "retrieval"}], r"tools\[0\] must be"),
        (["f"], r"tools\[0\] must be"),
        ([tool(parameters={"type": "string"})], r"tools\[0\].function.parameters must be"),
        ([tool(parameters=[])], r"tools\[0\].function.parameters must be"),
        ([tool(parameters={"properties": []})], r"tools\[0\].function.parameters.properties must be"),
        ([tool(description=1)], r"tools\[0\].function.description must be"),
    ],
)
def test_tools_that_are_wrong_are_refused_by_name(tools, message):
    with pytest.raises(RequestError, match=message):
        function_tools(tools)


def called(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]


LOOP = "{% for m in messages %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [("{{ c.function.arguments | tojson }}", {"a": "é"}), ("{{ '#' + c.function.arguments }}", '{"a": "é"}')],
)
def test_templates_get_arguments_in_the_form_they_write(written, arguments):
    _, turn = with_template_arguments(called('{"a": "é"}'), LOOP + written + END)
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments


EITHER = "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"


@pytest.mark.parametrize("arguments", ["{", '{"value": "', "[1]", '"a"', "null", "[" * 100_000])
@pytest.mark.parametrize(
    ("written", "is_text"),
    [("{{ c.function.arguments | tojson }}", False), ("{{ '#' + c.function.arguments }}", True), (EITHER, True)],
)
def test_arguments_that_are_no_object_are_text_or_its_one_value(written, is_text, arguments):
    _, turn = with_template_arguments(called(arguments), LOOP + written + END)
    assert turn["tool_calls"][0]["function"]["arguments"] == (arguments if is_text else {"arguments": arguments})
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls\[0\].function.arguments must be"):
        check_tool_arguments(called(arguments))


@pytest.mark.parametrize("arguments", ["", " ", {}, "{}"])
@pytest.mark.parametrize("written", ["{{ c.function.arguments | tojson }}", "{{ '#' + c.function.arguments }}", EITHER])
def test_empty_arguments_are_an_empty_object(written, arguments):
    template = LOOP + written + END
    messages = with_template_arguments(called(arguments), template)
    assert render_chat_template(template, messages, add_generation_prompt=False).removeprefix("#") == "{}"
    check_tool_arguments(messages)
