"""Commands that run clients of OpenAI's API with a server."""

from __future__ import annotations

import json
import shlex

from jaxis.server.clients import KEY_VARIABLE, Client, ServerAddress, environment


def _codex(server: ServerAddress) -> str:
    provider = {"name": "jaxis", "base_url": f"{server.url}/v1", "wire_api": "responses"}
    if server.needs_key:
        provider["env_key"] = KEY_VARIABLE
    table = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())  # TOML
    settings = {
        "model_provider": "jaxis",
        "model_providers.jaxis": f"{{{table}}}",
        "model_context_window": str(server.max_model_len),
        "web_search": "disabled",
    }
    options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
    return f"codex -m {shlex.quote(server.model)} {options}"


def _opencode(server: ServerAddress) -> str:
    options = {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}" if server.needs_key else "none"}
    models = {server.model: {"limit": {"context": server.max_model_len, "output": server.num_answer_tokens}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    config = json.dumps({"provider": {"jaxis": provider}})
    return f"OPENCODE_CONFIG_CONTENT={shlex.quote(config)} opencode -m {shlex.quote(f'jaxis/{server.model}')}"


def _open_webui(server: ServerAddress) -> str:
    variables = {"OPENAI_API_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
    return f"{environment(variables)} open-webui serve"


OPENAI_CLIENTS = (
    Client("Codex", _codex, is_agent=True),
    Client("opencode", _opencode, is_agent=True),
    Client("Open WebUI", _open_webui),
)
