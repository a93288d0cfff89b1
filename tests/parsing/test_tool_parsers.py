import json
import os
import random
import re
import time
from dataclasses import replace
from typing import ClassVar

import pytest
from tokenizers import Tokenizer

from jaxis.errors import ConfigError
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.parsing.output_parser import OutputParser, parse_output
from jaxis.parsing.parser_events import ToolCallArgumentsDelta, ToolCallStart, collect, merge_deltas
from jaxis.parsing.reasoning_parsers import get_reasoning_parser
from jaxis.parsing.template_formats import detect_parsers
from jaxis.parsing.tool_parsers import get_tool_parser
from jaxis.parsing.tool_parsers.tools import FunctionTool
from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template
from tests.parsing.tool_call_formats import FORMATS

WEATHER = FunctionTool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "code": {"type": "string"},
            "days": {"type": "integer"},
            "flags": {"type": "array", "items": {"properties": {"b": {"type": "array"}}}},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
)
TIME = FunctionTool("now")
JUMBLES = int(os.environ.get("JUMBLES", "25"))
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


def without_ids(events):
    """The events, with deltas as long as they can be."""
    return [replace(event, id="") if isinstance(event, ToolCallStart) else event for event in merge_deltas(events)]


def assert_same_at_every_cut(form, text, prompt=""):
    """Every position, pairs of positions near each other (of a long text, some), and one character at a time."""
    whole = summary(parse_output(make_parser(form, prompt), text))
    size = len(text)
    cuts = [(i,) for i in range(size + 1)] + [tuple(range(1, size))]
    if size < 120:
        cuts += [(i, j) for i in range(size) for j in range(i + 1, min(size, i + 25))]
    else:
        cuts += [(i, i + 1) for i in range(0, size, 3)]
    for cut in cuts:
        assert summary(collect(parse_cut(form, text, *cut, prompt=prompt))) == whole, (text, cut)
    return whole


def rendered_turn(form, *, reasoning="", content="", num_calls=2):
    calls = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(value)}}
        for i, (name, value) in enumerate([("get_weather", ARGUMENTS), ("now", {})])
    ]
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls[:num_calls]}
    messages = with_template_arguments([{"role": "user", "content": "?"}, turn], form.template)
    text = render_chat_template(form.template, messages, add_generation_prompt=False)
    return text.removeprefix("USER")


@pytest.mark.sampled(8)
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


@pytest.mark.parametrize("name", ["HERMES", "LLAMA", "GPT_OSS", "GEMMA4", "GLM", "QWEN3_CODER"])
def test_arguments_are_passed_on_as_they_come(name):
    form = FORMATS[name.lower()]
    text = rendered_turn(form, num_calls=1)
    events = parse_cut(form, text, *range(1, len(text)))
    pieces = [event.text for event in events if isinstance(event, ToolCallArgumentsDelta)]
    assert len(pieces) > 35
    assert json.loads("".join(pieces)) == ARGUMENTS


def fragments(form):
    """The pieces of a turn's text: markers, JSON, text, and halves of them."""
    text = rendered_turn(form, reasoning="Hm." if form.reasoning else "", content="Well:", num_calls=form.num_calls)
    pieces = re.findall(r"<[^<>]*>|\[/?[A-Z_]+\]|[\w.]+|\s+|.", text, re.DOTALL)
    openers = get_tool_parser(form.tool).openers * 5
    return [*pieces, *openers, '{"', "{", '"}', "}", "now", '{"name": "now", "arguments": {']


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_jumbled_text_is_the_same_at_any_cut(name):
    form = FORMATS[name]
    rng = random.Random(name)
    pieces = fragments(form)
    for _ in range(JUMBLES):
        begin = rng.randrange(len(pieces))
        text = "".join(pieces[begin : begin + rng.randrange(30)] + rng.choices(pieces, k=rng.randrange(20)))
        whole = parse_cut(form, text)
        for cut in (range(1, len(text)), sorted(rng.choices(range(len(text) + 1), k=3))):
            assert without_ids(parse_cut(form, text, *cut)) == without_ids(whole), (text, cut)
        for _, arguments, status in summary(collect(whole))[2]:
            assert status == "unfinished" or isinstance(json.loads(arguments), dict)


# What only looks like a call, or is one that is wrong: (format, text, content, calls).
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NOW = ("now", "{}", "complete")
INKLING_NOW = '<|message_model|>now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>'
INKLING_YES = "<|message_model|><|content_text|>Yes.<|end_message|><|content_model_end_sampling|>"
INKLING_CUT = INKLING_NOW.replace("args", "x").removesuffix("<|end_message|>").partition("now")[2]
K3_TOOLS, M3_END = "<|open|>tools<|sep|>", "]<]minimax[>[</tool_call>"
K3_CALL = f'{K3_TOOLS}<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>'
M3_CALL = f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n{M3_END}'


def k3_argument(key, kind, value):
    argument = f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    return K3_CALL.replace("<|close|>call", argument + "<|close|>call")


def m3_element(name, inner):
    return M3_CALL.replace(
        "]<]minimax[>[</inv", f"]<]minimax[>[<{name}>{inner}]<]minimax[>[</{name}>]<]minimax[>[</inv"
    )


K3_UNTYPED = k3_argument("a", "string", "1").replace(' type="string"', "")
ODD = [
    ("hermes", "The tag <tool_call> opens a call, {name} says which.", None, []),
    ("hermes", "if a <tool_call", None, []),
    ("hermes", "a <tool_call>[1]</tool_call> b", None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call> b', None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 102, None, []),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', None, []),
    ("hermes", "a <tool_call>b " + CALL, "a <tool_call>b", [NOW]),
    ("hermes", "a\n" + CALL + "\n b\n" + CALL + "\n", "ab", [NOW, NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call> b', "b", [NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "now"}', "", [("now", '{"a": 1}', "complete")]),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "x\n\ty"}}',
        "",
        [("now", '{"a": "x\\n\\ty"}', "complete")],
    ),
    ("hermes", 'a <tool_call>{"name": "now", "argum', None, []),
    ("hermes", 'a <tool_call>{"name": "now", "arguments": {"a": "b', "a", [("now", '{"a": "b', "unfinished")]),
    ("hermes", "", None, []),
    ("longcat", "a\n" + CALL.replace("tool_call", "longcat_tool_call"), "a", [NOW]),
    ("longcat", CALL, None, []),
    ("hermes", " \n", None, []),
    ("llama", '{"name": "Ann", "age": 3}<|eot_id|>', '{"name": "Ann", "age": 3}', []),
    ("llama", '{"name": "nobody", "parameters": {}}', None, []),
    ("llama", 'Say {"name": "now", "parameters": {}}', None, []),
    ("llama", " {now}", None, []),
    ("llama", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}<|eom_id|>', "", [NOW, NOW]),
    ("llama", 'Well,<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>', "Well,", [NOW]),
    ("llama", "<|python_tag|>print(1)<|eom_id|>", "print(1)", []),
    ("llama", '{"type": "function", "name": "now", "parameters": {}} then', "then", [NOW]),
    ("mistral", "[TOOL_CALLS] [] is none</s>", "[TOOL_CALLS] [] is none", []),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"nam', '{"nam', [NOW]),
    ("mistral", "[TOOL_CALLS]now{}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}</s>", "", [NOW, NOW]),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}", "", [NOW]),  # noqa: RUF001
    ("deepseek_v3", "a <｜tool▁call▁begin｜>b<｜tool▁call▁end｜>", None, []),  # noqa: RUF001
    ("kimi", "<|tool_call_begin|>now:12<|tool_call_argument_begin|>{}", "", [NOW]),
    ("gpt_oss", "<|channel|>final<|message|>Hi <b>.<|return|>", "Hi <b>.", []),
    ("gpt_oss", "Hi.", None, []),
    ("gpt_oss", "<|channel|>final<|message|>Hi", "Hi", []),
    ("gpt_oss", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>", "", [NOW]),
    ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>now()", None, []),
    ("gpt_oss", "<|channel|>ana", None, []),
    ("gemma4", "<|tool_call>call:now{}", "", [NOW]),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>\n<|tool_call>call:now{}<tool_call|><turn|>", "", [NOW, NOW]),
    ("gemma4", '<|tool_call>call:now{a:<|"|>b', "", [("now", '{"a": "b', "unfinished")]),
    ("gemma4", '<|tool_call>call: now {"a": [None, "b"]}', "", [("now", '{"a": [null, "b"]}', "complete")]),
    ("gemma4", "a <|tool_call>b", None, []),
    ("gemma4", "<|tool_call>call:now{a:007}<tool_call|>", None, []),
    ("gemma4", "<|tool_call>call:now{a:1,}<tool_call|>", None, []),
    ("gemma4", "<|tool_call>call:now{:1}<tool_call|>", None, []),
    ("gemma4", "<|tool_call>call:now" + "{a:" * 102, None, []),
    ("glm", "a <tool_call> b", None, []),
    ("glm", "<tool_call>now</tool_call><|observation|>", "", [NOW]),
    ("glm", "<tool_call>now\n<arg_key>a</arg_key> b", None, []),
    ("glm", "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1", "", [("now", '{"a": ', "unfinished")]),
    ("qwen3_coder", "<function=now></function>", "", [NOW]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</funct", "", [("now", "", "unfinished")]),
    ("qwen3_coder", "if a<function=b c", None, []),
    # In the form that a template gives a file's text: nothing around a value belongs to its format.
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>  a\n\n</arg_value>\n</tool_call>",
        "",
        [("get_weather", '{"city": "  a\\n\\n"}', "complete")],
    ),
    ("hy_v3", "<tool_calls>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", "", [NOW]),
    ("hy_v3", "Well.<tool_calls><tool_call>now<tool_sep></tool_call>", "Well.", [NOW]),
    ("hy_v3", "<tool_call>now</tool_call>", None, []),
    (
        "hy_v4",
        "Well.<tool_calls><tool_call>now</tool_call><tool_call>now</tool_call></tool_calls>",
        "Well.",
        [NOW, NOW],
    ),
    ("hy_v4", "<tool_calls>\n  <tool_call>now\n</tool_call>\n</tool_calls>", "", [NOW]),
    ("hy_v4", "<tool_calls><tool_call>now<arg_key>a</arg_key><arg_value>1", "", [("now", '{"a": ', "unfinished")]),
    ("hy_v4", "<tool_calls><tool_call></tool_call></tool_calls>", "<tool_call></tool_call>", []),
    ("hy_v4", "<tool_calls><tool_call>now<arg_key>a</arg_key> b</tool_call>", None, []),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>[e~[', "", [NOW]),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"></invoke><invoke name="now"></invoke>', "", [NOW, NOW]),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"></invoke><inv', "", [NOW]),
    ("minimax_m2", 'In XML, <invoke name="now"></invoke> calls.', None, []),
    ("minimax_m2", "a <minimax:tool_call> b", None, []),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="days">3</parameter><parameter name="ci',
        "",
        [("get_weather", '{"days": 3', "unfinished")],
    ),
    ("muse_glimmer", " to=user<|message|>Write <atem:invoke name=now>.<|eot|>", "Write <atem:invoke name=now>.", []),
    (
        "muse_glimmer",
        'to=user<|message|>Is <atem:invoke name="now"></atem:invoke> it?<|eot|>',
        'Is <atem:invoke name="now"></atem:invoke> it?',
        [],
    ),
    ("muse_glimmer", "Hi.", None, []),
    ("seed_oss", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call><seed:eos>", "", [NOW]),
    (
        "seed_oss",
        "<seed:tool_call><function=get_weather><parameter=flags>[{'a': (1, None)}]</parameter></function>",
        "",
        [("get_weather", '{"flags": [{"a": [1, null]}]}', "complete")],
    ),
    ("hunyuan", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>\n</answer>', "</answer>", [NOW]),
    ("hunyuan", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_', "", [NOW]),
    ("hunyuan", "a <tool_calls> b", None, []),
    ("apertus", '<|tools_prefix|>[{"now": {}}, {"now": {}}]<|tools_suffix|>', "", [NOW, NOW]),
    ("apertus", '<|tools_prefix|>[{"now": {}}', "", [NOW]),
    ("apertus", '<|tools_prefix|>[{"now": 1}]', None, []),
    ("nemotron_nano_v2", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', "", [NOW]),
    ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>Checking.<|im_end|>", "Checking.", [NOW]),
    ("lfm2", "<|tool_call_start|> [now(), now( )]", "", [NOW, NOW]),
    ("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', "", [NOW]),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[]", []),
    ("lfm2", "<|tool_call_start|>[now(1)]", None, []),
    ("lfm2", "<|tool_call_start|>[now(a=b)]", None, []),
    ("lfm2", "<|tool_call_start|>[now(a=" + "[" * 102, None, []),
    ("lfm2", "<|tool_call_start|>[now(a='b", "", [("now", '{"a": "b', "unfinished")]),
    (
        "lfm2",
        "<|tool_call_start|>[now(a='sed -n '3p' it\\'s', b=(1, -2.5), c={'d': None,}, e='', f=\"\\u00e9\\q\",)]",
        "",
        [
            (
                "now",
                '{"a": "sed -n \'3p\' it\'s", "b": [1, -2.5], "c": {"d": null}, "e": "", "f": "\\u00e9\\\\q"}',
                "complete",
            )
        ],
    ),
    (
        "olmo3",
        "<function_calls>now()\nnow(a='''b'c''')</function_calls>",
        "",
        [NOW, ("now", '{"a": "b\'c"}', "complete")],
    ),
    ("olmo3", "<function_calls>now() and more", "and more", [NOW]),
    ("gemma3", "Well:\n```tool_code\nprint(now())\ndefault_api.now()\n```", "Well:", [NOW, NOW]),
    ("gemma3", "```tool_code\n[now(), now()]\n```\nDone.", "Done.", [NOW, NOW]),
    ("gemma3", "```tool_code\nnow(a={'b': [True, None]}", "", [("now", '{"a": {"b": [true, null]}', "unfinished")]),
    ("gemma3", "```tool_code\nx = now()\n```", None, []),
    ("gemma3", "```python\nnow()\n```", None, []),
    ("functiongemma", "<start_function_call>call:now{}<end_function_call>", "", [NOW]),
    ("functiongemma", "<start_function_call>call:now{a:<escape>b", "", [("now", '{"a": "b', "unfinished")]),
    ("pythonic", "[now(), now( )]", "", [NOW, NOW]),
    ("pythonic", "<|python_start|>[now()]<|python_end|><|eot|>", "", [NOW]),
    ("pythonic", "[1, 2] are numbers", None, []),
    ("pythonic", "[unknown(a=1)]", None, []),
    ("pythonic", "So: [now()]", None, []),
    ("pythonic", "[now(a='b", "", [("now", '{"a": "b', "unfinished")]),
    ("inkling", INKLING_NOW, "", [NOW]),
    ("inkling", INKLING_NOW.removeprefix("<|message_model|>") + INKLING_NOW + INKLING_YES, "Yes.", [NOW, NOW]),
    ("inkling", "now" + INKLING_NOW, "now", [NOW]),
    ("inkling", "<|content_text|>now" + INKLING_NOW, "now", [NOW]),
    ("inkling", "now <b>", "now <b>", []),
    ("inkling", INKLING_NOW.removesuffix("}<|end_message|>"), "", [NOW]),
    ("inkling", INKLING_NOW.partition("{}")[0] + '{"a": "<', "", [("now", '{"a": "<', "unfinished")]),
    ("inkling", INKLING_NOW.partition('"args"')[0], INKLING_NOW.partition('"args"')[0].partition("now")[2], []),
    ("inkling", INKLING_NOW.replace('"args"', '"x"'), INKLING_CUT, []),
    ("inkling", "<|content_invoke_tool_text|>now(1)<|end_message|>" + INKLING_NOW, "now(1)", [NOW]),
    ("kimi_k3", K3_CALL, "", [NOW]),
    ("kimi_k3", K3_CALL + K3_CALL.replace("1", "2") + "<|close|>tools<|sep|><|close|>message<|sep|>", "", [NOW, NOW]),
    ("kimi_k3", "Hi <b>.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", "Hi <b>.", []),
    ("kimi_k3", K3_CALL.removesuffix("<|close|>call<|sep|>"), "", [("now", "", "unfinished")]),
    ("kimi_k3", K3_CALL.replace("index", "no"), K3_CALL.replace("index", "no").removeprefix(K3_TOOLS), []),
    ("kimi_k3", k3_argument("a", "string", 'x "<b>'), "", [("now", '{"a": "x \\"<b>"}', "complete")]),
    ("kimi_k3", k3_argument("a &quot;&amp;b", "string", "1"), "", [("now", '{"a \\"&b": "1"}', "complete")]),
    ("kimi_k3", k3_argument("a", "number", "1"), "", [("now", '{"a": 1}', "complete")]),
    ("kimi_k3", k3_argument("a", "array", '["1", {}]'), "", [("now", '{"a": ["1", {}]}', "complete")]),
    ("kimi_k3", k3_argument("a", "null", "null"), "", [("now", '{"a": null}', "complete")]),
    ("kimi_k3", K3_UNTYPED, K3_UNTYPED.removeprefix(K3_TOOLS), []),
    ("minimax_m3", M3_CALL, "", [NOW]),
    ("minimax_m3", "Well.\n" + M3_CALL + "[e~[", "Well.", [NOW]),
    ("minimax_m3", M3_CALL.partition("</invoke")[0], "", [("now", "", "unfinished")]),
    ("minimax_m3", M3_CALL.replace("invoke", "call"), M3_CALL.replace("invoke", "call").removesuffix(M3_END), []),
    ("minimax_m3", "]<]minimax[>[ and ]<]minimax[>[<tool_call> b", None, []),
    ("minimax_m3", m3_element("a", "x <b>\n"), "", [("now", '{"a": "x <b>\\n"}', "complete")]),
    ("minimax_m3", m3_element("a", "1") + "b", "b", [("now", '{"a": 1}', "complete")]),
    (
        "minimax_m3",
        m3_element("a", "]<]minimax[>[<item>1]<]minimax[>[</item>\n]<]minimax[>[<item>x]<]minimax[>[</item>"),
        "",
        [("now", '{"a": [1, "x"]}', "complete")],
    ),
    (
        "minimax_m3",
        m3_element("a", "]<]minimax[>[<b>]<]minimax[>[<c>null]<]minimax[>[</c>]<]minimax[>[</b>"),
        "",
        [("now", '{"a": {"b": {"c": null}}}', "complete")],
    ),
    (
        "minimax_m3",
        m3_element("a", "b ]<]minimax[>[<c>1]<]minimax[>[</c>"),
        m3_element("a", "b ]<]minimax[>[<c>1]<]minimax[>[</c>").removesuffix(M3_END),
        [],
    ),
    (
        "minimax_m3",
        m3_element("a", "]<]minimax[>[<c>1]<]minimax[>[</d>"),
        m3_element("a", "]<]minimax[>[<c>1]<]minimax[>[</d>").removesuffix(M3_END),
        [],
    ),
    (
        "minimax_m3",
        m3_element("a", "]<]minimax[>[<c>" * 200),
        m3_element("a", "]<]minimax[>[<c>" * 200).removesuffix(M3_END),
        [],
    ),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', "", [NOW]),
    ("granite", '<tool_call>{"name": "now", "arguments": {}}</tool_call> b', "b", [NOW]),
    ("granite", '<|tool_call|>{"name": "now", "arguments": {}}<|end_of_text|>', "", [NOW]),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}', "", [NOW]),
    ("granite", "a <|tool_call|>[] b", None, []),
    ("cohere", "<|START_RESPONSE|>Hi <b>.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "Hi <b>.", []),
    ("cohere", "<|START_TEXT|>Hi <b>.<|END_TEXT|>", "Hi <b>.", []),
    ("cohere", '<|START_ACTION|>{"tool_name": "now", "parameters": {}}<|END_ACTION|>', "", [NOW]),
    ("cohere", '<|START_ACTION|>[{"tool_name": "now", "parameters": {"a": "b', "", [("now", '{"a": "b', "unfinished")]),
    ("cohere", '<|START_ACTION|>[{"name": "now", "parameters": {}}]', None, []),
    ("cohere", "a <|START_ACTION|>[] b", None, []),
    ("command_r", 'Plan: I look.\nAction:```\n[{"tool_name": "now", "parameters": {}}]\n```', "Plan: I look.", [NOW]),
    ("command_r", 'Action: [{"tool_name": "now", "parameters": {}}]``', "", [NOW]),
    ("command_r", "Action: none. Another Action:\n```json\n[1]```", None, []),
    ("command_r", "Action: ```json\n[", None, []),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), ODD, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(ODD)]
)
def test_odd_text_is_content_or_said_to_be_unfinished(name, text, content, calls):
    got_reasoning, got_content, got_calls = assert_same_at_every_cut(FORMATS[name], text)
    assert got_reasoning == ""
    assert got_content == (text if content is None else content)
    assert got_calls == calls


# (format, prompt, text, reasoning, content)
REASONING = [
    ("hermes", "<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("hermes", "", "<think>\nHm. <b>\n", "Hm. <b>", ""),
    ("hermes", "<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("hermes", "What is <think>?", "Open <think> and </think>.", "", "Open <think> and </think>."),
    ("hermes", "", "<think></think>" + CALL, "", ""),
    ("hermes", "", "<think>Shall I " + CALL + "?</think>No.", "Shall I " + CALL + "?", "No."),
    ("kimi", "", "<think>Hm.<|im_end|>", "Hm.", ""),
    ("kimi", "<think>", "Hm. <|tool_calls_section_begin|><|tool_call_begin|>", "Hm.", "<|tool_call_begin|>"),
    ("minimax_m2", "]~b]ai\n<think>\n", "Hm.\n</think>\n\nYes.[e~[", "Hm.", "Yes."),
    (
        "muse_glimmer",
        "",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        "Hm.",
        "Yes.",
    ),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>\nYes.<seed:eos>", "Hm.", "Yes."),
    (
        "kimi_k3",
        "<|open|>think<|sep|>",
        "Hm. <b><|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "Hm. <b>",
        "Yes.",
    ),
    ("kimi_k3", "<|open|>response<|sep|>", "Yes.<|close|>response<|sep|><|end_of_msg|>", "", "Yes."),
    ("kimi_k3", "<|open|>think<|sep|>", "Hm.<|end_of_msg|>", "Hm.", ""),
    ("kimi_k3", "<|open|>think<|sep|>", "Hm." + K3_CALL, "Hm.", ""),
    *(
        ("inkling", prompt, before + "<|content_thinking|>Hm. <b>\n<|end_message|>" + INKLING_YES, "Hm. <b>", "Yes.")
        for prompt, before in (("<|message_model|>", ""), ("Hi", "<|message_model|>"))
    ),
    ("inkling", "<|message_model|><|content_thinking|>", "Hm.<|end_message|>" + INKLING_YES, "Hm.", "Yes."),
    ("inkling", "<|message_model|><|content_text|>", "now<|end_message|>" + INKLING_NOW, "", "now"),
    ("inkling", "<|message_model|>", "<|content_thinking|>Hm." + INKLING_NOW, "Hm.", ""),
    (
        "inkling",
        "<|message_model|>",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_thinking|>So.<|end_message|>" + INKLING_YES,
        "Hm.\nSo.",
        "Yes.",
    ),
    ("inkling", "<|message_model|>", "<|content_thinking|>Hm.<|content_model_end_sampling|>", "Hm.", ""),
    ("minimax_m3", "]~b]ai\n", "<mm:think>Hm.\n</mm:think>\n\nYes.[e~[", "Hm.", "Yes."),
    ("minimax_m3", "]~b]ai\n<mm:think>", "Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("minimax_m3", "]~b]ai\n", "</mm:think>\nYes.", "", "Yes."),
    ("minimax_m3", "]~b]ai\n", "Yes </mm:think>.", "", "Yes </mm:think>."),
    (
        "seed_oss",
        "",
        "<seed:think>Hm. <seed:cot_budget_reflect>9 tokens.</seed:cot_budget_reflect> So.</seed:think>Yes.",
        "Hm. 9 tokens. So.",
        "Yes.",
    ),
    (
        "seed_oss",
        "<seed:think><seed:cot_budget_reflect>\n",
        "None left.</seed:cot_budget_reflect></seed:think>Yes.",
        "None left.",
        "Yes.",
    ),
    ("glm", "<think>", "Hm.\n<tool_call>now</tool_call>", "Hm.", ""),
    ("hy_v4", "<think></think>", "Yes.", "", "Yes."),
    ("hunyuan", "", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
    ("hunyuan", "", "<think>\n\n</think>\n<answer>\nA </answer> B\n</answer>\n", "", "A </answer> B"),
    ("ernie", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
    ("ernie", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n" + CALL, "Hm.", "Yes."),
    ("apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.<|assistant_end|>", "Hm.", "Yes."),
    ("gemma4", "", "<|channel>thought\nHm. <b>\n<channel|>Yes.<turn|>", "Hm. <b>", "Yes."),
    ("gemma4", "<|channel>thought\n", "Hm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", "<|channel>thought\n<channel|>", "Yes.<turn|>", "", "Yes."),
    ("mistral_new", "", "[THINK]Hm.[/THINK]Yes.</s>", "Hm.", "Yes."),
    (
        "granite",
        "",
        "Here's my thought process:\nHm. Here is my resp. Here's my response: Yes.",
        "Hm. Here is my resp.",
        "Yes.",
    ),
    ("granite", "", "Here is my thought of it.", "", "Here is my thought of it."),
    ("granite", "", "Here is my thought process:\nHm.", "Hm.", ""),
    ("granite_33", "", "<think>Hm.</think>\n<response>\nYes.</response>\n<|end_of_text|>", "Hm.", "Yes."),
    (
        "granite_33",
        "",
        "<think>Hm.</think><response>a </response>, </response> b</response>",
        "Hm.",
        "a </response>, </response> b",
    ),
    ("granite_33", "", "<think>Hm.</think>Yes </response>", "Hm.", "Yes </response>"),
    ("granite_33", "", "<response>Yes</response>", "", "Yes"),
    ("cohere", "", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
    (
        "cohere",
        "<|START_THINKING|>",
        "Hm.<|END_THINKING|>\n<|START_TEXT|>Yes.<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "Hm.",
        "Yes.",
    ),
    ("cohere", "<|START_THINKING|><|END_THINKING|>", "<|START_RESPONSE|>Yes.", "", "Yes."),
    (
        "gpt_oss",
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Hm.\nSo.",
        "Yes.",
    ),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), REASONING)
def test_reasoning_is_parted_from_the_answer_at_any_cut(name, prompt, text, reasoning, content):
    got_reasoning, got_content, _ = assert_same_at_every_cut(FORMATS[name], text, prompt)
    assert (got_reasoning, got_content) == (reasoning, content)


def test_a_malformed_call_that_began_is_taken_back():
    form = FORMATS["hermes"]
    text = '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>' + CALL
    events = parse_cut(form, text)
    ends = [(event.index, event.status) for event in events if hasattr(event, "status")]
    assert ends == [(0, "malformed"), (1, "complete")]


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_tells_the_parsers(name):
    form = FORMATS[name]
    tool, reasoning = detect_parsers(form.template)
    assert get_tool_parser(tool) is get_tool_parser(form.tool)
    assert (reasoning and get_reasoning_parser(reasoning)) == (form.reasoning and get_reasoning_parser(form.reasoning))


@pytest.mark.parametrize(
    ("template", "model_type", "parsers"),
    [
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name',
            "llama",
            ("llama3_json", None),
        ),
        ("<|tool|>{{ m.tools }}<|/tool|>", "phi3", ("phi4_mini_json", None)),
        ("{{ '<tool_call>' }}{{ '</think>' }}", "qwen3", ("hermes", "qwen3")),
        ("{{ '<think></think>' }}", "phi3", (None, "deepseek_r1")),
        ("{{ m.content }}", "kimi_k2", ("kimi_k2", None)),
        ("{{ '<think>' }}{{ '</think>' }}", "kimi_k25", ("kimi_k2", "kimi_k2")),
        ("{{ '<|tool_list_start|>' }}", "lfm2", ("lfm2", None)),
        ("{{ m.content }}", "lfm2_moe", ("lfm2", None)),
        ("Use [func_name1(params_name1=params_value1...), func_name2(params)]", "llama", ("pythonic", None)),
        ("Put calls into ```tool_code", "gemma3_text", ("gemma3", None)),
        ("<start_function_call>", "gemma3_text", ("functiongemma", None)),
        ("<minimax:tool_call> <response> </think>", "minimax_m2", ("minimax_m2", "minimax_m2")),
        ("<tool_call> <function= </think>", "nemotron_h", ("qwen3_coder", "qwen3")),
        ("<tool_call> <|start_of_role|> <|end_of_role|>", "granitemoehybrid", ("hermes", None)),
        ("<tool_call> <arg_key> </think>", "laguna", ("glm45", "glm45")),
        ("{{ '<think{}>'.format(t) }}{{ '<arg_key{}>'.format(t) }}", "hy_v4", ("hy_v4", "hy_v3")),
        ("{{ '<tool_sep:opensource>' }}</think:opensource>", "hy_v3", ("hy_v3", "hy_v3")),
        ("<|START_THINKING|><|START_ACTION|><|START_TEXT|>", "cohere2", ("cohere_command4", "cohere_command4")),
        ("<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>", "cohere2", ("cohere_command3", "cohere_command3")),
    ],
)
def test_templates_that_show_less_still_tell(template, model_type, parsers):
    assert detect_parsers(template, model_type) == parsers


def test_special_tokens_are_in_no_answer_when_calls_are_not_read():
    parser = OutputParser(None, get_reasoning_parser("mistral"))
    output = parse_output(parser, "[THINK]Hm.</s>[/THINK]Yes.</s>")
    assert (output.reasoning, output.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>"), ("<think>", "</think>", "<tool_call>")])
def test_markers_that_are_special_tokens_in_one_models_tokenizer_only(special):
    """Granite 4 has the tags of Hermes, some of them as special tokens."""
    backend = Tokenizer.from_str(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    backend.add_special_tokens([*special, "<|end|>"])

    class OfOneModel:
        chat_templates: ClassVar = {"default": FORMATS["hermes"].template}
        special_tokens: ClassVar = {"eos_token": "<|end|>"}
        token_to_id = staticmethod(backend.token_to_id)
        special_token_ids = frozenset(backend.get_added_tokens_decoder())

    parsers = ModelParsers.select(OfOneModel(), "granitemoehybrid")
    assert parsers.needs_special_tokens == bool(special)
    text = "<think>Hm.</think>Well." + CALL + ("<|end|>" if special else "")
    output = parse_output(OutputParser(parsers.tool, parsers.reasoning, tools=TOOLS), text)
    assert summary(output) == ("Hm.", "Well.", [NOW])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("suffix", [":opensource", ":a+b(c\\1"])
@pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
def test_tags_end_as_those_of_the_tokenizer(name, suffix, special):
    """As published: the template puts the suffix into each tag, which is a token, special or not."""
    form = FORMATS[name]

    def made(tag):
        return f"{{{{ '{tag[0][:-1]}{{}}>'.format(HYTK) }}}}"

    template = "{% set HYTK = " + json.dumps(suffix) + " %}" + re.sub(r"</?[a-z_]+>", made, form.template)
    own = replace(form, template=template)
    text = rendered_turn(own, reasoning="Hm.", content="Well <tool_call>.")
    tags = [f"<{tag}{suffix}>" for tag in set(re.findall(r"</?([a-z_]+)>", form.template))]
    backend = Tokenizer.from_str(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    (backend.add_special_tokens if special else backend.add_tokens)(tags)

    class OfOneModel:
        chat_templates: ClassVar = {"default": template}
        special_tokens: ClassVar = {"eos_token": "<|end|>"}
        vocabulary: ClassVar = backend.get_vocab()
        token_to_id = staticmethod(backend.token_to_id)
        special_token_ids = frozenset(backend.get_added_tokens_decoder()) if special else frozenset()

    parsers = ModelParsers.select(OfOneModel(), None)
    assert parsers.needs_special_tokens
    text += "<|end|>"
    for size in (len(text), 1, 2, 7):
        parser = OutputParser(parsers.tool, parsers.reasoning, tools=TOOLS)
        events = [event for i in range(0, len(text), size) for event in parser.feed(text[i : i + size])]
        reasoning, content, calls = summary(collect([*events, *parser.finish()]))
        assert (reasoning, content) == ("Hm.", "Well <tool_call>.")
        assert [(call, json.loads(arguments), status) for call, arguments, status in calls] == [
            ("get_weather", ARGUMENTS, "complete"),
            ("now", {}, "complete"),
        ]


def test_no_template_means_no_parsers():
    assert detect_parsers(None, "gpt_oss") == (None, None)
    assert detect_parsers("{{ messages }}", "llama") == (None, None)


def test_unknown_parsers_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"tool_call_parser='x' is unknown; choose one of .*hermes"):
        get_tool_parser("x")
    with pytest.raises(ConfigError, match=r"reasoning_parser='x' is unknown; choose one of .*qwen3"):
        get_reasoning_parser("x")


def test_ids_are_their_own_and_in_the_form_the_model_needs():
    def ids(name, text):
        return [call.id for call in parse_output(make_parser(FORMATS[name]), text).tool_calls]

    first, second = ids("hermes", CALL + CALL)
    assert first != second
    assert all(call_id.startswith("call_") for call_id in (first, second))
    assert ids("kimi", "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}") == ["functions.now:3"]
    (mistral,) = ids("mistral", "[TOOL_CALLS]now[ARGS]{}")
    assert len(mistral) == 9
    assert mistral.isalnum()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=now><parameter=a>" * 20_000 + "</parameter>z"),
        ("hermes", '<tool_call>{"' * 20_000),
        ("kimi", "<|tool_call_begin|>" * 20_000 + "<|tool_call_end|>"),
    ],
)
def test_time_grows_with_the_text_and_not_with_its_square(name, text):
    begin = time.process_time()
    parse_output(make_parser(FORMATS[name]), text)
    assert time.process_time() - begin < 8  # about 1; read again after every opener, it is over 30
