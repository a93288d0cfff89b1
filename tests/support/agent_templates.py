"""Chat templates that differ in which order of messages they take, each as strict as a published one."""

_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_CALLS = (
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
_THINKING_TURN = (
    "<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n"
)
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Qwen 2.5's, and most others': any role anywhere.
CHATML = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}\n"
    + _TOOLS
    + "<|im_end|>\n{% for m in messages %}{% if not (loop.first and m.role == 'system') %}"
    + _THINKING_TURN
    + "{% endif %}{% endfor %}"
    + _OPEN
)
# Qwen 3's: reasoning is shown only in the answers since the user's last question.
DROPS_REASONING = (
    "{% set state = namespace(question=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set state.question = loop.index0 %}{% endif %}{% endfor %}"
    + _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.index0 > state.question and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _OPEN
)
# Qwen 3.5's: a system message must be the first.
FIRST_SYSTEM_ONLY = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + _TURN + "{% endfor %}" + _OPEN
)
# DeepSeek's: all system messages go to the head.
GATHERS_SYSTEM = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}\n\n{% endfor %}"
    + _TOOLS
    + "{% for m in messages if m.role != 'system' %}"
    + _THINKING_TURN
    + "{% endfor %}"
    + _OPEN
)
# Mistral's: user and assistant take turns; calls and results do not count.
ALTERNATES = (
    "{{ bos_token }}{% set chat = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% set state = namespace(users=true) %}"
    "{% for m in chat if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != state.users %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set state.users = not state.users %}{% endfor %}"
    "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in chat %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}{{ raise_exception('only user and assistant roles are supported') }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
# Gemma 2's: no system message, and turns alternate.
NO_SYSTEM = (
    "{{ bos_token }}{{ _TOOLS }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user' and loop.previtem is defined and "
    "loop.previtem.role == 'user') %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}" + _CALLS + "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
).replace("{{ _TOOLS }}", _TOOLS)
# One that leaves system messages out without a word.
SILENT_ABOUT_SYSTEM = _TOOLS + "{% for m in messages if m.role != 'system' %}" + _TURN + "{% endfor %}" + _OPEN

AGENT_TEMPLATES = {
    name.lower(): value for name, value in list(globals().items()) if name.isupper() and not name.startswith("_")
}
