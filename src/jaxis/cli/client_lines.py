"""Command lines that point ready-made clients at a server, to be pasted into a shell as they are."""

from __future__ import annotations

import json
import shlex

KEY_VARIABLE = "JAXIS_API_KEY"
# What Claude Code and Codex send before anybody has asked anything is 12,000 to 14,000 tokens.
AGENT_CONTEXT = 16384
# A longer answer than this leaves an agent too little of its context.
_ANSWER_SHARE = 4
_MAX_ANSWER = 32000


def client_lines(url: str, model: str, max_model_len: int, *, needs_key: bool) -> list[str]:
    """Returns one line for each client, under its name.

    Args:
      url: Address of the server, without a path.
      model: Name to ask for.
      max_model_len: The server's; agents must be told, as they do not ask.
      needs_key: True if requests must bring an API key, which is then taken from JAXIS_API_KEY.
    """
    lines = []
    if max_model_len >= AGENT_CONTEXT:
        num_answer = min(_MAX_ANSWER, max_model_len // _ANSWER_SHARE)
        lines += [
            f"Claude Code:\n  {_claude_code(url, model, max_model_len, num_answer, needs_key)}",
            f"Codex:\n  {_codex(url, model, max_model_len, needs_key)}",
            f"opencode:\n  {_opencode(url, model, max_model_len, num_answer, needs_key)}",
        ]
    else:
        lines.append(
            f"agents: Claude Code, Codex and opencode need a context of {AGENT_CONTEXT} tokens or more; "
            f"this one has {max_model_len}"
        )
    web = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": _key(needs_key)}
    return [*lines, f"Open WebUI:\n  {_environment(web)} open-webui serve"]


def _claude_code(url: str, model: str, context: int, num_answer: int, needs_key: bool) -> str:
    # Its helpers ask for other models by names of their own.
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": _key(needs_key),
        **dict.fromkeys((*names, "CLAUDE_CODE_SUBAGENT_MODEL"), model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(num_answer),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return f"{_environment(variables)} claude"


def _codex(url: str, model: str, context: int, needs_key: bool) -> str:
    provider = {"name": "jaxis", "base_url": f"{url}/v1", "wire_api": "responses"}
    if needs_key:
        provider["env_key"] = KEY_VARIABLE
    table = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())  # TOML
    settings = {
        "model_provider": "jaxis",
        "model_providers.jaxis": f"{{{table}}}",
        "model_context_window": str(context),
        "web_search": "disabled",
    }
    options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
    return f"codex -m {shlex.quote(model)} {options}"


def _opencode(url: str, model: str, context: int, num_answer: int, needs_key: bool) -> str:
    options = {"baseURL": f"{url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}" if needs_key else "none"}
    models = {model: {"limit": {"context": context, "output": num_answer}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    config = json.dumps({"provider": {"jaxis": provider}})
    return f"OPENCODE_CONFIG_CONTENT={shlex.quote(config)} opencode -m {shlex.quote(f'jaxis/{model}')}"


def _key(needs_key: bool) -> str:
    return f"${KEY_VARIABLE}" if needs_key else "none"


def _environment(variables: dict[str, str]) -> str:
    key = f"${KEY_VARIABLE}"
    # Quoted so that the shell puts in the key, whatever it holds.
    return " ".join(
        f'{name}="{key}"' if value == key else f"{name}={shlex.quote(value)}" for name, value in variables.items()
    )
