"""Chat templates that write an assistant's turn as the published ones of each format do, and nothing else."""

# ruff: noqa: RUF001 (the bars are DeepSeek's)

from __future__ import annotations

from dataclasses import dataclass

_LOOP = "{% for m in messages %}{% if m.role == 'user' %}USER{% else %}"
_END = "{% endif %}{% endfor %}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_THINK = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    Attributes:
      tool: Its parser.
      template: What writes it.
      reasoning: The reasoning parser, where the template writes reasoning.
      has_content: Whether a call may have content before it.
      num_calls: How many calls a turn may have here.
    """

    tool: str
    template: str
    reasoning: str | None = None
    has_content: bool = True
    num_calls: int = 2


HERMES = Format(
    "hermes",
    _LOOP + _THINK + "{{ m.content }}" + _CALLS + "{% if (loop.first and m.content) or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}' + _END,
    "qwen3",
)
LLAMA = Format(
    "llama3_json",
    _LOOP + _CALLS + '{{ \'{"name": "\' + f.name + \'", "parameters": \' }}{{ f.arguments | tojson }}}{% endfor %}'
    "<|eot_id|>{# <|python_tag|> #}" + _END,
    has_content=False,
    num_calls=1,
)
MISTRAL = Format(
    "mistral",
    _LOOP + "[TOOL_CALLS] [" + _CALLS + '{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}'
    "{% endfor %}]</s>" + _END,
    has_content=False,
)
MISTRAL_NEW = Format(
    "mistral",
    _LOOP
    + "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
    + _CALLS
    + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}</s>"
    + _END,
    "mistral",
)
DEEPSEEK_V3 = Format(
    "deepseek_v3",
    _LOOP + _THINK + "{{ m.content }}" + _CALLS + "{% if loop.first %}<｜tool▁calls▁begin｜>{% else %}\n{% endif %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\n```json\n' + f.arguments + '\n```' }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" + _END,
    "deepseek_r1",
)
DEEPSEEK_V31 = Format(
    "deepseek_v3",
    _LOOP + _THINK + "{{ m.content }}" + _CALLS + "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" + _END,
    "deepseek_r1",
)
DEEPSEEK_V32 = Format(
    "deepseek_v32",
    _LOOP + _THINK + "{{ m.content }}\n\n<｜DSML｜function_calls>" + _CALLS + '\n<｜DSML｜invoke name="{{ f.name }}">\n'
    "{% for k, v in f.arguments.items() %}{{ '\n' if not loop.first }}<｜DSML｜parameter name=\"{{ k }}\" "
    "string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</｜DSML｜parameter>"
    "{% endfor %}\n</｜DSML｜invoke>{% endfor %}\n</｜DSML｜function_calls><｜end▁of▁sentence｜>" + _END,
    "deepseek_r1",
)
KIMI = Format(
    "kimi_k2",
    _LOOP
    + "<think>{{ m.reasoning_content }}</think>{{ m.content }}<|tool_calls_section_begin|>"
    + _CALLS
    + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|><|im_end|>" + _END,
    "kimi_k2",
)
GPT_OSS = Format(
    "openai",
    _LOOP + "{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>"
    "<|start|>assistant{% endif %}{% if m.content %}<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "<|start|>assistant{% endif %}" + _CALLS + "{{ '<|start|>assistant' if not loop.first }} to=functions.{{ f.name }}"
    "<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}" + _END,
    "openai_gptoss",
)
GLM = Format(
    "glm45",
    _LOOP
    + "\n<think>{{ m.reasoning_content }}</think>{{ '\n' + m.content if m.content }}"
    + _CALLS
    + "\n<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}" + _END,
    "glm45",
)
_GEMMA4_VALUE = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}{{ v | tojson }}'
    "{% elif v is none %}null{% elif v is mapping %}{ {%- for k, x in v.items() %}{{ k }}:{{ value(x) }}"
    "{{ ',' if not loop.last }}{% endfor -%} }{% elif v is iterable %}[{% for x in v %}{{ value(x) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
GEMMA4 = Format(
    "gemma4",
    _GEMMA4_VALUE
    + _LOOP
    + "{% if m.reasoning_content %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}{{ m.content }}"
    + _CALLS
    + "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>{% endfor %}<|tool_response>"
    + _END,
    "gemma4",
)
QWEN3_CODER = Format(
    "qwen3_coder",
    _LOOP + "{{ m.content }}" + _CALLS + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}" + _END,
)
PHI4_MINI = Format(
    "phi4_mini_json",
    _LOOP
    + "{{ m.content }}<|tool_call|>["
    + _CALLS
    + "{{ f | tojson }}{{ ', ' if not loop.last }}{% endfor %}]<|/tool_call|><|end|>"
    + _END,
)
_GRANITE_CALLS = "<|tool_call|>[" + _CALLS + "{{ f | tojson }}{{ ', ' if not loop.last }}{% endfor %}]<|end_of_text|>"
GRANITE = Format(
    "granite",
    _LOOP + "{% if m.reasoning_content %}Here is my thought process:\n\n{{ m.reasoning_content }}\n\n"
    "Here is my response:\n\n{% endif %}{{ m.content }}" + _GRANITE_CALLS + "{# <|end_of_role|> #}" + _END,
    "granite",
)
GRANITE_33 = Format(
    "granite",
    _LOOP + "{# <think></think> <response></response> #}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think><response>{{ m.content }}</response>{% else %}{{ m.content }}{% endif %}"
    + _GRANITE_CALLS.replace("<|tool_call|>", "\n<tool_call>")
    + "{# <|tool_call|> <|end_of_role|> #}"
    + _END,
    "granite",
)
_COHERE_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}\n    "
    '{{ \'{"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name": "\' ~ f.name }}", '
    '"parameters": {{ f.arguments | tojson }}}{{ "," if not loop.last }}{% endfor %}\n]'
)
COHERE = Format(
    "cohere_command3",
    _LOOP + "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}"
    "<|START_ACTION|>[" + _COHERE_CALLS + "<|END_ACTION|><|END_OF_TURN_TOKEN|>" + _END,
    "cohere_command3",
    has_content=False,
)
COMMAND_R = Format(
    "cohere_command_r",
    _LOOP
    + "{# json-formatted list of actions #}{{ m.content }}\nAction: ```json\n["
    + _COHERE_CALLS.replace('{{ \'{"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name"', '{{ \'{"tool_name"')
    + "```<|END_OF_TURN_TOKEN|>"
    + _END,
)
FORMATS = {name.lower(): value for name, value in list(globals().items()) if isinstance(value, Format)}
