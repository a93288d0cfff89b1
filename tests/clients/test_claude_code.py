"""Claude Code works through a turn: it calls a tool, gets its output back, and ends; nothing leaves this machine."""

import json
import os
import shutil
import subprocess

import pytest

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.setup import build_engine
from jaxis.host.progress import ProgressDisplay
from tests.support.local_engine import LocalEngine
from tests.support.scripted_engine import ScriptedEngine, served

CLAUDE = os.environ.get("CLAUDE_BINARY") or shutil.which("claude")
pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(
        CLAUDE is None, reason="Claude Code is not installed: put claude into PATH, or name it in CLAUDE_BINARY"
    ),
]


def run_claude(url, folder, prompt, *options, **environment):
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "key",
        "ANTHROPIC_MODEL": "jaxis-tiny",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "200000",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **environment,
    }
    result = subprocess.run(
        [CLAUDE, "-p", prompt, "--output-format", "json", *options],
        cwd=work,
        env=settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return json.loads(result.stdout)


def test_a_turn_with_a_tool_call(tmp_path):
    engine = ScriptedEngine(max_model_len=1_000_000)
    arguments = {"command": "echo seen-$((40 + 2)) | tee made.txt", "description": "Make a file"}
    call = f"<tool_call>{json.dumps({'name': 'Bash', 'arguments': arguments})}</tool_call>"
    engine.answers = ["<think>\nI need a tool.\n</think>\n\nI look." + call]
    engine.text = "It is done."
    with served(engine, api_keys=("key",)) as url:
        result = run_claude(url, tmp_path, "Do it.", "--allowedTools", "Bash")
    assert (result["is_error"], result["result"]) == (False, "It is done.")
    assert result["num_turns"] == 2
    assert (tmp_path / "work" / "made.txt").read_text() == "seen-42\n"
    # The second request carried the first one's turn and the tool's output.
    turn = engine.prompt[engine.prompt.index("[assistant]<think>") :]
    assert turn.startswith("[assistant]<think>I need a tool.</think>I look." + call[:40])
    assert "seen-42" in turn
    assert "x-anthropic-billing-header" not in engine.prompt
    assert engine.params.max_tokens == 8000


def test_a_prompt_that_is_too_long_is_understood(tmp_path):
    with served(ScriptedEngine(max_model_len=100), api_keys=("key",)) as url:
        result = run_claude(url, tmp_path, "Do it.")
    assert result["is_error"]
    assert "too long" in result["result"]


def test_the_embedded_model_answers(tmp_path):
    arguments = EngineArgs(max_num_seqs=4, max_num_batched_tokens=256, kv_cache_memory="32MiB")
    built = build_engine(arguments, ProgressDisplay(False))
    try:
        engine = AsyncLLMEngine(LocalEngine(built), max_queued=8, stall_seconds=120.0)
        with served(engine, api_keys=("key",)) as url:
            short = ("--system-prompt", "Be brief.", "--tools", "")  # its own would not fit
            result = run_claude(url, tmp_path, "What is the capital of France?", *short)
    finally:
        built.engine.close()
    assert not result["is_error"]
    assert result["result"]
    assert result["usage"]["output_tokens"] > 1
