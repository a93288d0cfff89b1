"""opencode works through a turn over /v1/chat/completions: a tool call, its output, the end."""

import json
import os
import shutil
import subprocess

import pytest

from tests.support.scripted_engine import ScriptedEngine, served

OPENCODE = os.environ.get("OPENCODE_BINARY") or shutil.which("opencode")
pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(
        OPENCODE is None, reason="opencode is not installed: put opencode into PATH, or name it in OPENCODE_BINARY"
    ),
]
CALL = '<tool_call>{"name": "bash", "arguments": {"command": "echo seen-$((40 + 2)) | tee made.txt"}}</tool_call>'


class Agent(ScriptedEngine):
    """Calls a tool first. opencode asks for a title too, at the same time and without tools."""

    def __init__(self):
        super().__init__(max_model_len=1_000_000)
        self.prompts = []

    async def generate(self, prompt, *arguments, **more):
        self.prompts.append(prompt.text)
        begins = '"bash"' in prompt.text and "[tool]" not in prompt.text
        self.text = "I look." + CALL if begins else "It is done."
        async for output in super().generate(prompt, *arguments, **more):
            yield output


def test_a_turn_with_a_tool_call(tmp_path):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    engine = Agent()
    with served(engine, api_keys=("key",)) as url:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{url}/v1", "apiKey": "key"},
            "models": {"jaxis-tiny": {}},
        }
        settings = {"provider": {"jaxis": provider}, "model": "jaxis/jaxis-tiny", "autoupdate": False}
        (work / "opencode.json").write_text(json.dumps(settings))
        result = subprocess.run(
            [OPENCODE, "run", "Do it."],
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 0, result.stderr
    assert "It is done." in result.stdout
    assert (work / "made.txt").read_text() == "seen-42\n"
    [last] = [prompt for prompt in engine.prompts if "[tool]" in prompt]
    assert f"[assistant]I look.{CALL[:30]}" in last
    assert "seen-42" in last[last.index("[tool]") :]
