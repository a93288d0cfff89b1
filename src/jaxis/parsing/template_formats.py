# ruff: noqa: RUF001 (the bars are DeepSeek's)

from __future__ import annotations

from collections.abc import Iterable

# Strings that are all in a template -> tool parser; the first match counts.
_TOOL_MARKS = (
    (("<|START_ACTION|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("json-formatted list of actions",), "cohere_command_r"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<|open|>", "<|end_of_msg|>"), "kimi_k3"),
    (("<|content_invoke_tool_json|>",), "inkling"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<｜DSML｜ calls>",), "deepseek_v41"),
    (("<｜DSML｜tool_calls>",), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v3"),
    (("<|channel|>",), "openai"),
    (("<atem:",), "muse_glimmer"),
    (("<tool_call|>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("```tool_code",), "gemma3"),
    (("[func_name1(",), "pythonic"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|tool_call_start|>", "```python"), "minicpm"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<TOOLCALL>",), "nemotron_nano_v2"),
    *(((tag,), "hy_v3") for tag in ("<tool_sep>", "<tool_sep{}>", "<tool_sep:")),
    *(((tag,), "hy_v4") for tag in ("<arg_key{}>", "<arg_key:")),
    (("<tool_calls>", "<arg_key>"), "hy_v4"),
    (("<function_calls>",), "olmo3"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>", "<|end_of_role|>"), "granite"),
    (("<|tool_call|>",), "phi4_mini_json"),
    (("<tool_call>",), "hermes"),
    (("<longcat_tool_call>",), "longcat"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (("<|/tool|>",), "phi4_mini_json"),
)
_REASONING_MARKS = (
    (("<|open|>", "<|end_of_msg|>"), "kimi_k3"),
    (("<|content_thinking|>",), "inkling"),
    (("<mm:think>",), "minimax_m3"),
    (("<|START_THINKING|>", "<|START_TEXT|>"), "cohere_command4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<response></response>"), "granite"),
    (("<|channel|>",), "openai_gptoss"),
    (("<atem:",), "muse_glimmer"),
    (("<channel|>",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<|inner_prefix|>",), "apertus"),
    (("<|thought_start|>",), "minicpm"),
    (("<minimax:tool_call>", "</think>"), "minimax_m2"),  # shows tools' answers between <response> tags
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>",), "deepseek_r1"),
    (("<think{}>",), "hy_v3"),
    (("</think:",), "hy_v3"),
)
# The templates of some checkpoints do not show their model's format.
_BY_MODEL_TYPE = {
    "apertus": ("apertus", "apertus"),
    "deepseek_v32": ("deepseek_v32", None),
    "gpt_oss": ("openai", "openai_gptoss"),
    "hunyuan_v1_dense": ("hunyuan_a13b", None),
    "hunyuan_v1_moe": ("hunyuan_a13b", None),
    "kimi_k2": ("kimi_k2", None),
    "kimi_k25": ("kimi_k2", None),
    "lfm2": ("lfm2", None),
    "lfm2_moe": ("lfm2", None),
    "lfm3": ("lfm2", None),
    "llama4": ("llama3_json", None),
}


def detect_parsers(chat_template: str | None, model_type: str | None = None) -> tuple[str | None, str | None]:
    """Returns the names of the tool parser and of the reasoning parser that a model needs, by its chat template.

    None if the model has no template, no such format, or an unknown one. `model_type`, from the model's configuration,
    is for formats that the template does not show.
    """
    if not chat_template:
        return None, None
    by_type = _BY_MODEL_TYPE.get(model_type or "", (None, None))
    tool = _match(chat_template, _TOOL_MARKS) or by_type[0]
    reasoning = _match(chat_template, _REASONING_MARKS) or by_type[1]
    if reasoning == "deepseek_r1":
        own = {"hermes": "qwen3", "qwen3_coder": "qwen3"}
        own |= {name: name for name in ("glm45", "hy_v3", "hy_v4", "kimi_k2")}
        reasoning = own.get(tool or "", reasoning)
    return tool, reasoning


def _match(chat_template: str, marks: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    return next((name for strings, name in marks if all(string in chat_template for string in strings)), None)
