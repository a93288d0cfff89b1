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
      template: Template that writes it.
      reasoning: The reasoning parser, where the template writes reasoning.
      has_content: True if a call may have content before it.
      num_calls: Number of calls that a turn may have here.
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
LONGCAT = Format("longcat", HERMES.template.replace(_THINK, "").replace("tool_call>", "longcat_tool_call>"))
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
DEEPSEEK_V4 = Format("deepseek_v4", DEEPSEEK_V32.template.replace("function_calls>", "tool_calls>"), "deepseek_r1")
DEEPSEEK_V41 = Format(
    "deepseek_v41",
    DEEPSEEK_V32.template.replace("｜DSML｜", "｜DSML｜ ").replace("function_calls>", "calls>"),
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
KIMI_K3 = Format(
    "kimi_k3",
    "{% macro t(v) %}{{ 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number else 'string' "
    "if v is string else 'object' if v is mapping else 'array' }}{% endmacro %}"
    + _LOOP
    + "<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|><|open|>response<|sep|>{{ m.content }}"
    "<|close|>response<|sep|><|open|>tools<|sep|>"
    + _CALLS
    + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"'
    '<|sep|>{% for k, v in f.arguments.items() %}<|open|>argument key="{{ k }}" type="{{ t(v) }}"<|sep|>'
    "{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}"
    "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>" + _END,
    "kimi_k3",
)
INKLING = Format(
    "inkling",
    _LOOP + "{% if m.reasoning_content %}<|message_model|><|content_thinking|>{{ m.reasoning_content }}<|end_message|>"
    "{% endif %}{% if m.content %}<|message_model|><|content_text|>{{ m.content }}<|end_message|>{% endif %}"
    + _CALLS
    + '<|message_model|>{{ f.name }}<|content_invoke_tool_json|>{"name":"{{ f.name }}",'
    '"args":{{ f.arguments | tojson }}}<|end_message|>{% endfor %}<|content_model_end_sampling|>' + _END,
    "inkling",
)
_M3_VALUE = (
    "{% macro value(v) %}{% if v is string %}{{ v }}{% elif v is mapping %}{% for k, x in v.items() %}"
    "]<]minimax[>[<{{ k }}>{{ value(x) }}]<]minimax[>[</{{ k }}>{% endfor %}{% elif v is iterable %}"
    "{% for x in v %}]<]minimax[>[<item>{{ value(x) }}]<]minimax[>[</item>{% endfor %}{% else %}{{ v | tojson }}"
    "{% endif %}{% endmacro %}"
)
MINIMAX_M3 = Format(
    "minimax_m3",
    _M3_VALUE
    + _LOOP
    + "{% if m.reasoning_content %}<mm:think>{{ m.reasoning_content }}</mm:think>{% endif %}{{ m.content }}"
    "]<]minimax[>[<tool_call>\n" + _CALLS + ']<]minimax[>[<invoke name="{{ f.name }}">\n'
    "{% for k, v in f.arguments.items() %}]<]minimax[>[<{{ k }}>{{ value(v) }}]<]minimax[>[</{{ k }}>{% endfor %}"
    "]<]minimax[>[</invoke>\n{% endfor %}]<]minimax[>[</tool_call>[e~[" + _END,
    "minimax_m3",
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
FUNCTIONGEMMA = Format(
    "functiongemma",
    _GEMMA4_VALUE.replace('<|"|>', "<escape>")
    + _LOOP
    + "{{ m.content }}"
    + _CALLS
    + "<start_function_call>call:{{ f.name }}{{ value(f.arguments) }}<end_function_call>{% endfor %}"
    "<start_function_response>" + _END,
)
QWEN3_CODER = Format(
    "qwen3_coder",
    _LOOP + "{{ m.content }}" + _CALLS + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}" + _END,
)
MINIMAX_M2 = Format(
    "minimax_m2",
    _LOOP + _THINK + "{{ m.content }}\n<minimax:tool_call>\n" + _CALLS + '<invoke name="{{ f.name }}">\n'
    '{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>[e~[" + _END,
    "minimax_m2",
)
MUSE_GLIMMER = Format(
    "muse_glimmer",
    _LOOP + "{% set first = namespace(at='') %}{% if m.reasoning_content %} to=self<|message|>{{ m.reasoning_content }}"
    "<|eom|>{% set first.at = '<|start|>assistant' %}{% endif %}{% if m.content %}{{ first.at }} to=user<|message|>"
    "{{ m.content }}<|eom|>{% set first.at = '<|start|>assistant' %}{% endif %}"
    + _CALLS
    + "{{ first.at }} to={{ f.name }}<|message|>\n<atem:function_calls>\n"
    '<atem:invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<atem:parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</atem:parameter>\n{% endfor %}</atem:invoke>\n</atem:function_calls>"
    "{{ '<|eot|>' if loop.last else '<|eom|>' }}{% set first.at = '<|start|>assistant' %}{% endfor %}" + _END,
    "muse_glimmer",
)
SEED_OSS = Format(
    "seed_oss",
    _LOOP
    + "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>\n{% endif %}{{ m.content }}\n"
    + _CALLS
    + "\n<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
    "{{ v if v is string else v | string }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}"
    "<seed:eos>" + _END,
    "seed_oss",
)
HY_V3 = Format(
    "hy_v3",
    _LOOP + _THINK + "{{ m.content }}<tool_calls>" + _CALLS + "\n<tool_call>{{ f.name }}<tool_sep>\n"
    "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}\n</tool_calls>"
    + _END,
    "hy_v3",
)
HY_V4 = Format(
    "hy_v4",
    _LOOP
    + "<think>{{ m.reasoning_content }}</think>{{ m.content }}<tool_calls>"
    + _CALLS
    + "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}</tool_calls>"
    + _END,
    "hy_v4",
)
HUNYUAN = Format(
    "hunyuan_a13b",
    _LOOP
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n<answer>\n{% endif %}{{ m.content }}"
    "<tool_calls>[" + _CALLS + "{{ f | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</tool_calls>"
    "{{ '\n</answer>' if m.reasoning_content }}" + _END,
    "hunyuan_a13b",
)
ERNIE = Format(
    "hermes",
    _LOOP + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{% if m.content %}"
    "<response>\n{{ m.content }}\n</response>\n{% endif %}" + _CALLS + '\n<tool_call>\n{"name": "{{ f.name }}", '
    '"arguments": {{ f.arguments | tojson }}}\n</tool_call>\n{% endfor %}' + _END,
    "ernie45",
)
APERTUS = Format(
    "apertus",
    _LOOP
    + "{% if m.reasoning_content %}<|inner_prefix|>{{ m.reasoning_content }}<|inner_suffix|>{% endif %}{{ m.content }}"
    "<|tools_prefix|>["
    + _CALLS
    + '{"{{ f.name }}": {{ f.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]'
    "<|tools_suffix|><|assistant_end|>" + _END,
    "apertus",
)
NEMOTRON_NANO_V2 = Format(
    "nemotron_nano_v2",
    _LOOP + _THINK + "{{ m.content }}<TOOLCALL>[" + _CALLS + "{{ f | tojson }}{{ ', ' if not loop.last }}{% endfor %}]"
    "</TOOLCALL>" + _END,
    "deepseek_r1",
)
_PYTHON_CALL = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson if v is string else v | string }}"
    "{{ ', ' if not loop.last }}{% endfor %})"
)
LFM2 = Format(
    "lfm2",
    _LOOP + _THINK + "{{ m.content }}<|tool_call_start|>[" + _CALLS + _PYTHON_CALL + "{{ ', ' if not loop.last }}"
    "{% endfor %}]<|tool_call_end|><|im_end|>" + _END,
    "deepseek_r1",
)
MINICPM = Format(
    "minicpm",
    _LOOP
    + "{% if m.reasoning_content %}<|thought_start|>\n{{ m.reasoning_content }}\n<|thought_end|>\n{% endif %}"
    + "{{ m.content }}<|tool_call_start|>\n```python\n"
    + _CALLS
    + _PYTHON_CALL
    + "{{ '\n' if not loop.last }}{% endfor %}\n```\n<|tool_call_end|><|im_end|>"
    + _END,
    "minicpm",
)
OLMO3 = Format(
    "olmo3",
    _LOOP
    + _THINK
    + "{{ m.content }}<function_calls>"
    + _CALLS
    + _PYTHON_CALL
    + "{{ '\n' if not loop.last }}{% endfor %}"
    "</function_calls>" + _END,
    "deepseek_r1",
)
GEMMA3 = Format(
    "gemma3",
    _LOOP
    + "{{ m.content }}\n```tool_code\n"
    + _CALLS
    + _PYTHON_CALL
    + "{{ '\n' if not loop.last }}{% endfor %}\n```"
    + _END,
)
PYTHONIC = Format(
    "pythonic",
    _LOOP
    + "{# [func_name1(params_name1=params_value1)] #}["
    + _CALLS
    + _PYTHON_CALL
    + "{{ ', ' if not loop.last }}{% endfor %}]<|python_end|><|eot|>"
    + _END,
    has_content=False,
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
