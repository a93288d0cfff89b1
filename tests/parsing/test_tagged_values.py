"""Arguments between tags: their types are those of the schema, and each ends at its own tag."""

# ruff: noqa: RUF001 (the bars are DeepSeek's)

import json

import jsonschema
import pytest

from jaxis.parsing.output_parser import OutputParser
from jaxis.parsing.parser_events import ToolCallEnd, collect
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.tools import FunctionTool

# How a call of `f` is written: before the arguments, each argument, and after them.
TAGS = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n",
        "<parameter={}>{}</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "glm45": ("<tool_call>f\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "hy_v3": (
        "<tool_calls>\n<tool_call>f<tool_sep>\n",
        "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
        "</tool_call>\n</tool_calls>",
    ),
    "hy_v4": (
        "<tool_calls><tool_call>f",
        "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
        "</tool_call></tool_calls>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "muse_glimmer": (
        ' to=f<|message|>\n<atem:function_calls>\n<atem:invoke name="f">\n',
        '<atem:parameter name="{}">{}</atem:parameter>\n',
        "</atem:invoke>\n</atem:function_calls><|eot|>",
    ),
}
TEXT = {"properties": {"path": {"type": "string"}, "content": {"type": "string"}, "count": {"type": "integer"}}}


def parse(name, text, schema=None):
    """The calls of an answer, which are the same at every cut; nothing that a stream sends is taken back."""
    tools = [FunctionTool("f", parameters={"type": "object", **(schema or {})}), FunctionTool("g")]
    outputs = []
    for size in (len(text), 1, 7, *range(-len(text) + 1, 0, 9)):
        parser = OutputParser(get_tool_parser(name), None, tools=tools)
        pieces = [text[:-size], text[-size:]] if size < 0 else [text[i : i + size] for i in range(0, len(text), size)]
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert not any(isinstance(event, ToolCallEnd) and event.status == "malformed" for event in events)
        output = collect(events)
        outputs.append((output.content, [(call.name, call.arguments, call.status) for call in output.tool_calls]))
    assert all(output == outputs[0] for output in outputs)
    return outputs[0]


def written(name, *arguments):
    begin, argument, end = TAGS[name]
    return begin + "".join(argument.format(key, value) for key, value in arguments) + end


def arguments_of(name, text, schema=None):
    """The arguments of the one call of such an answer."""
    content, [(function, arguments, status)] = parse(name, text, schema or TEXT)
    assert (content.strip(), function, status) == ("", "f", "complete")
    return json.loads(arguments)


DEFINITIONS = {
    "Zip/Code": {"type": "string"},
    "Unit": {"enum": ["1", "true", "null"]},
    "Any": {"type": ["string", "null"]},
}
STRING = {"$ref": "#/$defs/Zip~1Code"}
SCHEMAS = {
    "ref": ({"properties": {"x": STRING}}, "12345", "12345"),
    "allOf": ({"properties": {"x": {"allOf": [{"$ref": "#/$defs/Unit"}], "default": "1"}}}, "true", "true"),
    "optional": ({"properties": {"x": {"anyOf": [STRING, {"type": "null"}]}}}, "1", "1"),
    "optional null": ({"properties": {"x": {"anyOf": [STRING, {"type": "null"}]}}}, "null", None),
    "const": ({"properties": {"x": {"const": "1"}}}, "1", "1"),
    "oneOf of const": ({"properties": {"x": {"oneOf": [{"const": "1"}, {"const": "null"}]}}}, "null", "null"),
    "enum": ({"properties": {"x": {"$ref": "#/$defs/Unit"}}}, "null", "null"),
    "not": ({"properties": {"x": {"$ref": "#/$defs/Any", "not": {"type": "null"}}}}, "null", "null"),
    "listed string": ({"properties": {"x": {"enum": ["1", 2]}}}, "1", "1"),
    "listed number": ({"properties": {"x": {"anyOf": [{"const": "1"}, {"const": 2}]}}}, "2", 2),
    "JSON": ({"properties": {"x": STRING}}, '{"a": 1}', '{"a": 1}'),
    "integer": ({"properties": {"x": {"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}}}, "1", 1),
    "root": ({"$ref": "#/$defs/Args"}, "1", "1"),
    "root allOf": ({"allOf": [{"$ref": "#/$defs/Args"}, {"properties": {"y": {}}}]}, "1", "1"),
    "pattern": ({"patternProperties": {"^x": STRING}}, "1", "1"),
    "additional": ({"properties": {"y": {"type": "integer"}}, "additionalProperties": STRING}, "1", "1"),
    "recursive": (
        {"properties": {"x": {"$ref": "#/$defs/Tree"}}},
        '{"kids": [{"kids": []}]}',
        {"kids": [{"kids": []}]},
    ),
}
TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("case", SCHEMAS)
def test_a_value_has_the_type_of_its_schema(case, name):
    schema, text, value = SCHEMAS[case]
    schema = {**schema, "$defs": {**DEFINITIONS, "Tree": TREE, "Args": {"properties": {"x": STRING}}}}
    arguments = arguments_of(name, written(name, ("x", text)), schema)
    jsonschema.validate(arguments, schema)
    assert arguments == {"x": value}


def closings(name):
    """The tag that closes a value, and the one that closes a call."""
    return TAGS[name][1].rstrip("\n").rpartition("}")[2].strip(), TAGS[name][2].partition(">")[0] + ">"


@pytest.mark.parametrize("name", TAGS)
def test_a_value_may_hold_the_tags_around_it(name):
    end, call_end = closings(name)
    begin, argument, after = TAGS[name]
    for value in (
        f'<node>\n<parameter name="rate">5{end}\n</node>',
        f"{end}",
        f"a {end} b{end}",
        f"x\n{call_end}\ny",
        f"{call_end} and {end}",
        f"<tool_call> </tool_call> {begin.strip()}",
        argument.format("rate", "5") + "!",
        f"see:\n{begin}{argument.format('path', 'a')}{argument.format('x', 'b')}{after}\nIt is {end}.",
        f"two:\n{written(name, ('path', 'a'))}\n{written(name, ('content', 'b'))}\nend",
    ):
        text = written(name, ("path", "a.xml"), ("content", value), ("count", 3))
        assert arguments_of(name, text) == {"path": "a.xml", "content": value, "count": 3}, value
        text = written(name, ("path", value), ("content", value))
        if "path" not in value:
            assert arguments_of(name, text) == {"path": value, "content": value}


@pytest.mark.parametrize("name", TAGS)
def test_a_missing_tag_ends_a_value_where_the_next_begins(name):
    end, call_end = closings(name)
    whole = written(name, ("path", "a"), ("content", "b"), ("count", 3))
    expected = {"path": "a", "content": "b", "count": 3}
    assert arguments_of(name, whole) == expected
    for at in range(1, 4):
        parts = whole.split(end)
        kept = [part + (end if i + 1 != at and i < 3 else "") for i, part in enumerate(parts)]
        got = arguments_of(name, "".join(kept))
        assert {key: value.strip() if isinstance(value, str) else value for key, value in got.items()} == expected
    assert len(arguments_of(name, whole.replace(end, ""))) == 3
    if name not in ("glm45", "hy_v3", "hy_v4"):  # in these, no other tag would be left
        assert arguments_of(name, whole.replace(call_end, "")) == expected
        assert arguments_of(name, whole.replace(end, "").replace(call_end, "")).keys() == expected.keys()


@pytest.mark.parametrize("name", TAGS)
def test_calls_follow_each_other_whatever_is_missing(name):
    begin, argument, after = TAGS[name]
    if name == "muse_glimmer":
        begin, after = begin.replace(" to", "<|start|>assistant to"), after.replace("eot", "eom")
    end, call_end = closings(name)
    call = begin + argument.format("path", "a") + after
    for first in (call, call.replace(end, ""), call.replace(call_end, "")):
        if name in ("glm45", "hy_v3", "hy_v4") and call_end not in first:
            continue
        content, calls = parse(name, f"{first}\n{call}", TEXT)
        assert content.strip() == ""
        assert [json.loads(arguments)["path"].strip() for _, arguments, _ in calls] == ["a", "a"]
    content, calls = parse(name, call.removesuffix("<|eom|>") + " Done.", TEXT)
    assert (content.strip(), len(calls)) == ("Done.", 1)


@pytest.mark.parametrize("name", TAGS)
def test_a_cut_call_holds_what_was_said(name):
    end, _ = closings(name)
    text = written(name, ("path", "a"), ("content", f"x {end} y"))
    text = text[: text.index(" y") + 2]
    content, [(_, arguments, status)] = parse(name, text, TEXT)
    assert (content, status) == ("", "unfinished")
    assert json.loads(arguments + '"}')["path"] == "a"
    assert json.loads(arguments + '"}')["content"].startswith("x")


def test_json_values_may_hold_all_tags_in_their_strings():
    for name in TAGS:
        end, call_end = closings(name)
        value = {"a": [f'"{end}{call_end}</tool_call>', "b"], "c": f"{end}{TAGS[name][2]}"}
        value["c"] = value["c"].replace("\n", "")
        text = written(name, ("x", json.dumps(value)), ("y", "1"))
        assert arguments_of(name, text, {"properties": {"x": {"type": "object"}, "y": {"type": "integer"}}}) == {
            "x": value,
            "y": 1,
        }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "g", "arguments": ""}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "arguments": }</tool_call>'),
        ("hermes", '<tool_call>{"arguments": "null", "name": "g"}</tool_call>'),
        ("llama3_json", '{"name": "g", "parameters": " "}'),
        ("kimi_k2", "<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|><|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS]g[ARGS]</s>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n```<｜tool▁call▁end｜>"),
        ("openai", "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>"),
        ("gemma4", "<|tool_call>call:g<tool_call|>"),
        ("apertus", '<|tools_prefix|>[{"g": ""}]<|tools_suffix|>'),
        ("qwen3_coder", "<tool_call>\n<function=g>\n</tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="g">\n</minimax:tool_call>'),
    ],
)
def test_nothing_in_place_of_arguments_is_an_empty_object(name, text):
    assert parse(name, text) == ("", [("g", "{}", "complete")])


def test_a_name_that_no_arguments_follow_stays_text():
    text = "[TOOL_CALLS]g, I think"
    content, calls = parse("mistral", text)
    assert (content, calls) == (text, [])


@pytest.mark.parametrize("value", ['a<|"|>b', '<|"|>', 'say <|"|>, so', '{<|"|>:', "x,y:z"])
def test_a_string_may_hold_the_quote_around_it(value):
    text = f'<|tool_call>call:f{{path:<|"|>{value}<|"|>,lines:[<|"|>{value}<|"|>,<|"|>b<|"|>],count:3}}<tool_call|>'
    content, [(_, arguments, status)] = parse("gemma4", text, TEXT)
    assert (content, status) == ("", "complete")
    assert json.loads(arguments) == {"path": value, "lines": [value, "b"], "count": 3}
