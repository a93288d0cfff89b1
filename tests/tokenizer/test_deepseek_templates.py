"""The chat templates of DeepSeek V4 and V4.1, whose checkpoints have a program instead: texts as it writes them."""

# ruff: noqa: RUF001 (the bars are DeepSeek's)

import json

import pytest

from jaxis.errors import RequestError
from jaxis.parsing.template_formats import detect_parsers
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.config import TokenizerConfig
from jaxis.tokenizer.template_choice import chat_template_source

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "title": "é"}}}]
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Two calls.",
    "tool_calls": [
        {"id": "a", "function": {"name": "find", "arguments": {"what": 'x "y"', "most": 3, "in": ["p", None]}}},
        {"id": "b", "function": {"name": "find", "arguments": {"what": "é"}}},
    ],
}
USED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    CALLED,
    {"role": "tool", "tool_call_id": "b", "content": "second"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "fir"}, {"type": "text", "text": "st"}]},
    {"role": "user", "content": "And?"},
]
TALK = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "one", "reasoning_content": "thought"},
    {"role": "user", "content": "2"},
]


def v4(messages, **variables):
    return render_chat_template(chat_template_source("deepseek-v4"), messages, **variables)


def v41(messages, **variables):
    return render_chat_template(chat_template_source("deepseek-v4.1"), messages, **variables)


def test_results_come_in_the_order_of_the_calls_and_thinking_stays_with_tools():
    text = v4(USED, tools=TOOLS, reasoning_effort="low")
    head, _, rest = text.partition(USER)
    assert head.startswith(f"{BOS}Be brief.\n\n## Tools\n\n")
    assert (
        '\n### Available Tool Schemas\n\n{"name": "find", "parameters": {"type": "object", "title": "é"}}\n\n' in head
    )
    assert rest == (
        f"Look.{ASSISTANT}<think>Two calls.</think>I look.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="what" string="true">x "y"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="most" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="in" string="false">["p", null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="what" string="true">é</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}{USER}<tool_result>fir\n\nst</tool_result>\n\n"
        f"<tool_result>second</tool_result>\n\nAnd?{ASSISTANT}<think>"
    )
    later = v41(USED, tools=TOOLS, reasoning_effort="low")
    assert later.startswith(f"{BOS}<｜System｜>{EFFORT.format(50)}Be brief.\n\n## Tools\n\n")
    tags = rest.replace("｜DSML｜tool_calls", "｜DSML｜ calls")
    assert later.partition(USER)[2] == tags.replace("｜DSML｜invoke", "｜DSML｜ invoke").replace(
        "｜DSML｜par", "｜DSML｜ par"
    )


def test_tools_without_a_system_message_come_first():
    for render in (v4, v41):
        assert render(TALK, tools=TOOLS, enable_thinking=False).startswith(
            f"{BOS}{'<｜System｜>' if render is v41 else ''}\n\n## Tools\n\n"
        )


def test_thinking_of_earlier_turns_is_dropped():
    said = f"{USER}1{ASSISTANT}</think>one{EOS}{USER}2{ASSISTANT}"
    kept = f"{USER}1{ASSISTANT}<think>thought</think>one{EOS}{USER}2{ASSISTANT}<think>"
    assert v4(TALK, reasoning_effort="low") == f"{BOS}{said}<think>"
    assert v4(TALK, enable_thinking=False) == v4(TALK, reasoning_effort="none") == f"{BOS}{said}</think>"
    assert v4(TALK, reasoning_effort="low", drop_thinking=False) == f"{BOS}{kept}"
    assert v41(TALK) == f"{BOS}<｜System｜>{EFFORT.format(75)}{said}<think>"
    assert v41(TALK, thinking=False) == f"{BOS}{said}</think>"
    assert v41(TALK, add_generation_prompt=False) == v41(TALK).removesuffix(f"{ASSISTANT}<think>")


@pytest.mark.parametrize(
    ("effort", "begins"),
    [
        *(("low", USER), ("medium", USER), (None, "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")),
        *(("high", "Reasoning Effort: Absolute maximum"), ("max", "Reasoning Effort: Beyond maximum — exhaustive, ")),
    ],
)
def test_v4_says_the_effort_at_the_beginning(effort, begins):
    assert v4(TALK, reasoning_effort=effort).startswith(f"{BOS}{begins}")


@pytest.mark.parametrize(
    ("effort", "number"), [("low", 50), ("high", 75), ("xhigh", 75), ("max", 100), (1, 1), (42, 42)]
)
def test_v41_says_the_effort_as_a_number(effort, number):
    assert v41(TALK, reasoning_effort=effort).startswith(f"{BOS}<｜System｜>{EFFORT.format(number)}{USER}1")


@pytest.mark.parametrize("effort", ["medium", 0, 101, True, 1.5])
def test_v41_refuses_other_efforts(effort):
    with pytest.raises(RequestError, match="reasoning_effort must be none, low, high, xhigh, max or a whole number"):
        v41(TALK, reasoning_effort=effort)


def test_v41_has_system_messages_within_a_conversation():
    chat = [*TALK[:2], {"role": "system", "content": "Shout."}]
    assert v41(chat, enable_thinking=False) == (
        f"{BOS}{USER}1{ASSISTANT}</think>one{EOS}<｜System｜>Shout.{ASSISTANT}</think>"
    )


def test_further_roles_and_tasks():
    chat = [
        {"role": "developer", "content": "Old."},
        {"role": "user", "content": "1"},
        {"role": "latest_reminder", "content": "Monday"},
        {"role": "user", "content": "2", "task": "title"},
    ]
    text = f"{USER}1{ASSISTANT}</think><｜latest_reminder｜>Monday{USER}2<｜title｜>"
    assert v4(chat, reasoning_effort="low") == f"{BOS}{text}"
    assert v4(chat, enable_thinking=False) == f"{BOS}{USER}Old.{text}"
    chat[-1]["task"] = "action"
    assert v4(chat, enable_thinking=False).endswith(f"{USER}2{ASSISTANT}</think><｜action｜>")


@pytest.mark.parametrize(
    ("model_type", "parser"), [("deepseek_v4", "deepseek_v4"), ("deepseek_v41", "deepseek_v41"), ("llama", None)]
)
def test_a_checkpoint_without_a_template_has_that_of_its_model(model_type, parser, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    templates = TokenizerConfig.from_folder(tmp_path).chat_templates
    assert detect_parsers("\n".join(templates.values())) == (parser, parser and "deepseek_r1")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert TokenizerConfig.from_folder(tmp_path).chat_templates == {"default": "{{ messages }}"}
