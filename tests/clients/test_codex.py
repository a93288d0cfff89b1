"""The Codex CLI works through a turn: it calls a tool, gets its output back, and ends; nothing leaves this machine."""

import os
import shutil
import subprocess

import pytest

from tests.support.scripted_engine import ScriptedEngine, served

CODEX = os.environ.get("CODEX_BINARY") or shutil.which("codex")
pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(CODEX is None, reason="Codex is not installed: put codex into PATH, or name it in CODEX_BINARY"),
]
CONFIG = """
model = "jaxis-tiny"
model_provider = "jaxis"
model_context_window = 100000
web_search = "disabled"

[model_providers.jaxis]
name = "jaxis"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "JAXIS_API_KEY"
"""


def run_codex(url, folder, prompt, *options):
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=url))
    return subprocess.run(
        [CODEX, "exec", "--skip-git-repo-check", "-s", "danger-full-access", *options, prompt],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home), "JAXIS_API_KEY": "key"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_turn_with_a_tool_call(tmp_path):
    engine = ScriptedEngine(max_model_len=1_000_000)
    call = (
        '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo seen-$((40 + 2)) | tee made.txt"}}</tool_call>'
    )
    engine.answers = ["<think>\nI need a tool.\n</think>\n\nI look." + call]
    engine.text = "It is done."
    with served(engine, api_keys=("key",)) as url:
        result = run_codex(url, tmp_path, "Do it.")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "It is done."
    assert (tmp_path / "work" / "made.txt").read_text() == "seen-42\n"
    # The second request carried the first one's turn and the tool's output.
    turn = engine.prompt[engine.prompt.rindex("[user]Do it.") :]
    assert turn.startswith("[user]Do it.[assistant]<think>I need a tool.</think>I look." + call[:40])
    assert "seen-42" in turn


def test_a_prompt_that_is_too_long_is_understood(tmp_path):
    with served(ScriptedEngine(max_model_len=100), api_keys=("key",)) as url:
        result = run_codex(url, tmp_path, "Do it.")
    assert result.returncode != 0
    assert "context window" in result.stderr
