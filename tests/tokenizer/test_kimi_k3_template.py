"""Kimi K3's chat template, whose checkpoints have a program instead: texts as it writes them."""

import json

import pytest

from jaxis.errors import RequestError
from jaxis.parsing.template_formats import detect_parsers
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.config import TokenizerConfig
from jaxis.tokenizer.template_choice import chat_template_source

END = "<|close|>message<|sep|><|end_of_msg|>"
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in your '
    "thinking channel (not including the response channel), supported values include `low`, `medium`, `high`, and "
    "`max`.\nNow the system is invoked with `thinking_effort={}`." + END
)
ASKED = '<|open|>message role="user"<|sep|>Look.' + END
BEGUN = '<|open|>message role="assistant"<|sep|>'
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "title": "é"}}}]
CALLS = [
    {"id": "a", "function": {"name": "find", "arguments": {"what": 'x "y"', "most": 3, "in": ["p", None], "é": True}}},
    {"id": "b", "function": {"name": "now", "arguments": {}}},
]
CALLED = {"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": CALLS}
LOOK = {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "."}]}
WRITTEN = (
    BEGUN + "<|open|>think<|sep|>Two.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="find" index="1"<|sep|>'
    '<|open|>argument key="what" type="string"<|sep|>x "y"<|close|>argument<|sep|>'
    '<|open|>argument key="most" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|open|>argument key="in" type="array"<|sep|>["p", null]<|close|>argument<|sep|>'
    '<|open|>argument key="é" type="boolean"<|sep|>true<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>' + END
)


def render(messages, **variables):
    return render_chat_template(chat_template_source("kimi-k3"), messages, **variables)


def result(tool, index, text):
    return f'<|open|>message role="tool" tool="{tool}" index="{index}"<|sep|>{text}{END}'


def test_tools_are_declared_first_and_sorted():
    declared = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available tools, described in '
        'JSONSchema.\n\n```json\n[{"function":{"name":"find","parameters":{"title":"é","type":"object"}},'
        f'"type":"function"}}]\n```{END}'
    )
    system = f'<|open|>message role="system"<|sep|>Be brief.{END}'
    text = render([{"role": "system", "content": "Be brief."}, LOOK], tools=TOOLS)
    assert text == declared + EFFORT.format("max") + system + ASKED + BEGUN + "<|open|>think<|sep|>"


@pytest.mark.parametrize(
    ("variables", "effort"),
    [({}, "max"), ({"reasoning_effort": "low"}, "low"), ({"thinking_effort": "high"}, "high")],
)
def test_an_effort_is_said_where_it_thinks(variables, effort):
    assert render([LOOK], **variables) == EFFORT.format(effort) + ASKED + BEGUN + "<|open|>think<|sep|>"


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}])
def test_without_thinking_the_answer_is_begun(variables):
    answered = BEGUN + "<|open|>response<|sep|>Yes.<|close|>response<|sep|>" + END
    messages = [LOOK, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, LOOK]
    assert render(messages, **variables) == ASKED + answered + ASKED + BEGUN + "<|open|>response<|sep|>"


@pytest.mark.parametrize("ids", [("b", "a"), (None, None), ("b", "c")])
def test_results_come_in_the_order_of_the_calls_where_ids_tell_it(ids):
    results = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in zip(ids, ("1", "2"), strict=True)]
    given = ("2", "1") if ids == ("b", "a") else ("1", "2")
    text = render([LOOK, CALLED, *results], add_generation_prompt=False)
    assert text == EFFORT.format("max") + ASKED + WRITTEN + result("find", 1, given[0]) + result("now", 2, given[1])


def test_results_after_another_message_are_numbered_on():
    results = [{"role": "tool", "tool_call_id": "a", "content": "1"}, LOOK, {"role": "tool", "content": "2"}]
    text = render([CALLED, *results], add_generation_prompt=False)
    assert text == EFFORT.format("max") + WRITTEN + result("find", 1, "1") + ASKED + result("now", 2, "2")


def test_names_are_escaped():
    name = {"role": "user", "name": 'a"&b', "content": "Look."}
    assert '<|open|>message role="user" name="a&quot;&amp;b"<|sep|>Look.' in render([name])


@pytest.mark.parametrize(
    ("messages", "variables", "why"),
    [
        ([LOOK], {"reasoning_effort": "huge"}, "reasoning_effort huge is not one of none, low"),
        ([{"role": "tool", "content": "1"}], {}, "names neither its call nor its tool"),
        ([{"role": "critic", "content": "1"}], {}, "messages of the role critic are not supported"),
    ],
)
def test_what_it_has_no_form_for_is_refused(messages, variables, why):
    with pytest.raises(RequestError, match=why):
        render(messages, **variables)


def test_it_is_chosen_by_the_model_and_tells_the_parsers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    source = TokenizerConfig.from_folder(tmp_path).chat_templates["default"]
    assert source == chat_template_source("kimi-k3")
    assert detect_parsers(source, "kimi_k3") == ("kimi_k3", "kimi_k3")


def test_images_are_placeholders_in_messages_and_results():
    parts = [{"type": "text", "text": "A "}, {"type": "image"}, {"type": "text", "text": " b"}]
    text = render([{"role": "user", "content": parts}, CALLED, {"role": "tool", "tool_call_id": "b", "content": parts}])
    shown = "A <|kimi_image_placeholder|> b"
    assert '<|open|>message role="user"<|sep|>' + shown + END in text
    assert result("now", 1, shown) in text
