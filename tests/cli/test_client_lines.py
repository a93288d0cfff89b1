"""Lines printed for clients, read as a shell and the clients read it."""

import json
import shlex
import subprocess
import tomllib

import pytest

from jaxis.server.clients import ServerAddress, client_lines
from jaxis.server.protocol import protocols

URL = "http://127.0.0.1:8123"
MODEL = "org/it's a model"


def lines_of(model, max_model_len, needs_key):
    clients = [client for protocol in protocols() for client in protocol.clients]
    return client_lines(clients, ServerAddress(URL, model, max_model_len, needs_key))


def by_client(lines):
    return {name: command.strip() for name, _, command in (line.partition(":\n") for line in lines)}


def run(command, program, tmp_path, key=None):
    """Runs a line in a shell where the program prints its words and environment."""
    path = tmp_path / program
    path.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({} if key is None else {"JAXIS_API_KEY": key})
    out = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=True).stdout
    words, variables = json.loads(out)
    return words, variables


@pytest.mark.parametrize(("key", "sent"), [(None, "none"), ("a b$c", "a b$c")])
def test_claude_code_and_open_webui_get_address_model_context_and_key(tmp_path, key, sent):
    commands = by_client(lines_of(MODEL, 32768, needs_key=key is not None))
    words, variables = run(commands["Claude Code"], "claude", tmp_path, key)
    assert words == []
    assert variables["ANTHROPIC_BASE_URL"] == URL
    assert variables["ANTHROPIC_AUTH_TOKEN"] == sent
    models = [value for name, value in variables.items() if name.endswith("_MODEL")]
    assert models == [MODEL] * 5
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    words, variables = run(commands["Open WebUI"], "open-webui", tmp_path, key)
    assert words == ["serve"]
    assert (variables["OPENAI_API_BASE_URL"], variables["OPENAI_API_KEY"]) == (f"{URL}/v1", sent)


@pytest.mark.parametrize("needs_key", [False, True])
def test_codex_gets_a_provider_in_toml(tmp_path, needs_key):
    command = by_client(lines_of(MODEL, 200_000, needs_key=needs_key))["Codex"]
    words, _ = run(command, "codex", tmp_path)
    assert words[:2] == ["-m", MODEL]
    settings = dict(word.split("=", 1) for word in words[3::2])
    assert set(words[2::2]) == {"-c"}
    provider = {"name": "jaxis", "base_url": f"{URL}/v1", "wire_api": "responses"}
    provider |= {"env_key": "JAXIS_API_KEY"} if needs_key else {}
    assert tomllib.loads(f"x={settings.pop('model_providers.jaxis')}")["x"] == provider
    assert settings == {"model_provider": "jaxis", "model_context_window": "200000", "web_search": "disabled"}


@pytest.mark.parametrize(("needs_key", "key"), [(False, "none"), (True, "{env:JAXIS_API_KEY}")])
def test_opencode_gets_a_provider_in_json(tmp_path, needs_key, key):
    command = by_client(lines_of(MODEL, 200_000, needs_key=needs_key))["opencode"]
    words, variables = run(command, "opencode", tmp_path)
    assert words == ["-m", f"jaxis/{MODEL}"]
    [(name, provider)] = json.loads(variables["OPENCODE_CONFIG_CONTENT"])["provider"].items()
    assert name == "jaxis"
    assert provider == {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{URL}/v1", "apiKey": key},
        "models": {MODEL: {"limit": {"context": 200_000, "output": 32_000}}},
    }


def test_agents_are_not_pointed_at_a_context_that_their_first_request_fills():
    lines = lines_of("m", 8192, needs_key=False)
    assert (
        lines[0] == "agents: Claude Code, Codex and opencode need a context of 16384 tokens or more; this one has 8192"
    )
    assert list(by_client(lines[1:])) == ["Open WebUI"]
    assert shlex.split(lines[1].partition("\n")[2])[-2:] == ["open-webui", "serve"]
