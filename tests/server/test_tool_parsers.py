import json

import pytest
from tool_call_formats import FORMATS

from jaxis.server.output_parser import OutputParser, parse_output
from jaxis.server.parser_events import collect
from jaxis.server.reasoning_parsers import get_reasoning_parser
from jaxis.server.tool_choice import template_messages
from jaxis.server.tool_parsers import get_tool_parser
from jaxis.server.tool_parsers.tools import FunctionTool
from jaxis.tokenizer.chat_template import render_chat_template

WEATHER = FunctionTool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "code": {"type": "string"},
            "days": {"type": "integer"},
            "flags": {"type": "array"},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)
TIME = FunctionTool("now")
TOOLS = (WEATHER, TIME)
ARGUMENTS = {
    "city": 'Köln "a\\b"\n  <b>日本</b> 😀\n{"x": [',
    "code": "007",
    "days": -3,
    "flags": [True, None, {"a": 1.5e-3, "b": []}],
    "unit": None,
}


def make_parser(form, prompt=""):
    reasoning = get_reasoning_parser(form.reasoning) if form.reasoning else None
    return OutputParser(get_tool_parser(form.tool), reasoning, tools=TOOLS, prompt=prompt)


def summary(output):
    calls = [(call.name, call.arguments, call.status) for call in output.tool_calls]
    return output.reasoning, output.content, calls


def parse_cut(form, text, *cuts, prompt=""):
    parser = make_parser(form, prompt)
    events = []
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        events += parser.feed(text[begin:end])
    return [*events, *parser.finish()]


def assert_same_at_every_cut(form, text, prompt=""):
    """Every position, every pair of positions of a short text, and one character at a time."""
    whole = summary(parse_output(make_parser(form, prompt), text))
    size = len(text)
    cuts = [(i,) for i in range(size + 1)] + [tuple(range(1, size))]
    cuts += [(i, j) for i in range(size) for j in range(i + 1, min(size, i + (40 if size < 200 else 2)))]
    for cut in cuts:
        assert summary(collect(parse_cut(form, text, *cut, prompt=prompt))) == whole, (text, cut)
    return whole


def rendered_turn(form, *, reasoning="", content="", num_calls=2):
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for i, (name, value) in enumerate([("get_weather", ARGUMENTS), ("now", {})])
    ]
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls[:num_calls]}
    messages = template_messages([{"role": "user", "content": "?"}, turn], form.template)
    text = render_chat_template(form.template, messages, add_generation_prompt=False)
    return text.removeprefix("USER")


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_template_writes_is_read_back_at_any_cut(name):
    form = FORMATS[name]
    reasoning = "Which city?\n\nKöln." if form.reasoning else ""
    content = "I'll look: a < b.\nSo <tool" if form.has_content else ""
    text = rendered_turn(form, reasoning=reasoning, content=content, num_calls=form.num_calls)
    got_reasoning, got_content, calls = assert_same_at_every_cut(form, text)
    assert got_reasoning == reasoning
    assert got_content == content
    assert [(call, json.loads(arguments), status) for call, arguments, status in calls] == [
        ("get_weather", ARGUMENTS, "complete"),
        ("now", {}, "complete"),
    ][: form.num_calls]
