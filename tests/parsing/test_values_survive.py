"""Any value that a template writes into a call is read back, however the text is cut and wherever it ends."""

import itertools
import json
import os
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxis.parsing.output_parser import OutputParser
from jaxis.parsing.parser_events import collect
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.tagged_values import TaggedValueParser
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template
from tests.parsing.tool_call_formats import FORMATS

EXAMPLES = int(os.environ.get("EXAMPLES", "20"))
DEFINITIONS = {"Text": {"type": "string"}, "Unit": {"enum": ["1", "true", "null"]}}
PROPERTIES = {
    "path": {"type": "string"},
    "content": {"$ref": "#/$defs/Text"},
    "unit": {"allOf": [{"$ref": "#/$defs/Unit"}]},
    "note": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
    "lines": {"type": "array", "items": {"type": "string"}},
    "limits": {"type": "object"},
    "count": {"type": "integer"},
}
TOOLS = (
    FunctionTool("write_file", parameters={"type": "object", "properties": PROPERTIES, "$defs": DEFINITIONS}),
    FunctionTool("now"),
)
MARKERS = sorted(
    {
        marker
        for form in FORMATS.values()
        for parser in [get_tool_parser(form.tool)]
        for marker in (*parser.openers, *parser.dropped, *re.findall(r"</?[\w:]+>|<\|?[^<>{}%]*\|?>", form.template))
    }
    | {"<parameter=path>", "<parameter=x>", '<parameter name="rate">', "<function=now>", '<invoke name="now">'}
    | {"<arg_key>x</arg_key>", "<arg_value>", "</arg_value>", "</parameter>", "</function>", "</invoke>"}
    | {"<tool_call>now", "now(a='", '{"name": "now", "arguments": {}}', "[TOOL_CALLS]now[ARGS]{}", "call:now{a:"}
)
PIECES = st.one_of(
    st.sampled_from(MARKERS),
    st.sampled_from(["\n", "\n\n", " ", '"', "'", "\\", "\\n", ",", ", a:", "}", "]", ")", "<", "</", "é日😀", "\t"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=4),
)
TEXTS = st.lists(PIECES, max_size=7).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {"path": TEXTS},
    optional={
        "content": TEXTS,
        "unit": st.sampled_from(["1", "true", "null"]),
        "note": TEXTS,
        "lines": st.lists(TEXTS, max_size=2),
        "limits": st.dictionaries(st.sampled_from(["a", "b c"]), TEXTS, max_size=2),
        "count": st.integers(),
    },
)
CUTS = st.lists(st.integers(0, 2000), max_size=6)


def texts(value):
    """The strings in a value."""
    return (
        [value]
        if isinstance(value, str)
        else list(value.values() if isinstance(value, dict) else value)
        if isinstance(value, (dict, list))
        else []
    )


def cannot_be_told(form, key, value):
    """True if a format without escapes has two readings of a string: it holds its own closing tag, and behind that
    what follows one; or the beginning of another argument of the function; or is null where that is allowed too.
    """
    parser = get_tool_parser(form.tool)
    if quote := getattr(parser, "quote", None):
        return re.search(rf"{re.escape(quote)}\s*[,}}\]]", value) is not None
    if not issubclass(parser, TaggedValueParser) or (key in ("lines", "limits") and form.tool != "seed_oss"):
        return False
    if key == "note" and value.strip() in ("null", "None"):
        return True
    closings = [parser.call_end, *parser.section_tags[1:], *parser.dropped]
    following = [parser.argument_tags[0], parser.call_tags[0], *parser.section_tags, *closings]
    after = "|".join(map(re.escape, following))
    others = "|".join(re.escape(parser.argument_tags[0] + name) for name in PROPERTIES if name != key)
    return re.search(rf"{re.escape(parser.value_end)}\s*({after})|{others}", value) is not None


def written(form, calls):
    turns = [
        {"id": f"functions.{name}:{i}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": turns}
    messages = with_template_arguments([{"role": "user", "content": "?"}, message], form.template)
    return render_chat_template(form.template, messages, add_generation_prompt=False).removeprefix("USER")


def parsed(form, text, cuts):
    parser = OutputParser(get_tool_parser(form.tool), None, tools=TOOLS)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    events = [event for begin, end in itertools.pairwise(places) for event in parser.feed(text[begin:end])]
    return collect([*events, *parser.finish()])


def summary(output):
    return output.content, [(call.name, call.arguments, call.status) for call in output.tool_calls]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(arguments=ARGUMENTS, cuts=CUTS, end=st.integers(0, 2000))
def test_values_survive(name, arguments, cuts, end):
    form = FORMATS[name]
    strings = [(key, text) for key, value in arguments.items() for text in texts(value)]
    assume(not any(cannot_be_told(form, key, text) for key, text in strings))
    text = written(form, [("write_file", arguments), ("now", {})][: form.num_calls])
    whole = parsed(form, text, [])
    assert summary(parsed(form, text, cuts)) == summary(whole)
    assert summary(parsed(form, text, range(len(text)))) == summary(whole)
    cut = text[: end % (len(text) + 1)]
    assert (
        summary(parsed(form, cut, cuts))
        == summary(parsed(form, cut, range(len(cut))))
        == summary(parsed(form, cut, []))
    )
    assert [(call.name, call.status) for call in whole.tool_calls] == [("write_file", "complete"), ("now", "complete")][
        : form.num_calls
    ], text
    assert json.loads(whole.tool_calls[0].arguments) == arguments, text
