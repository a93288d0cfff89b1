"""Optional rooms: a copy of the package without one still generates, and serves OpenAI's chat."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jaxis
from tests.support.quick_rows import quick_rows
from tests.test_floors import OPTIONAL

# An editable installation's own finder comes before PYTHONPATH, in every process.
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable" not in type(finder).__module__]
"""
GENERATE_AND_SERVE = textwrap.dedent("""
    import jaxis
    from jaxis.cli import main
    from jaxis.rooms import has_room
    assert not any(map(has_room, ROOMS))
    if __name__ == "__main__":
        from starlette.testclient import TestClient
        from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
        from jaxis.engine.client.engine_process import EngineProcess
        from jaxis.server.app import create_app
        from jaxis.server.config import ServerConfig

        params = jaxis.SamplingParams(temperature=0, max_tokens=8)
        with jaxis.LLM(show_progress=False, max_model_len=256) as llm:
            [generated] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
        process = EngineProcess({"max_model_len": 256}, stall_seconds=60.0)
        app = create_app(AsyncLLMEngine(process, max_queued=4, stall_seconds=60.0), ServerConfig())
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"messages": question, "max_tokens": 8, "temperature": 0}
        with TestClient(app) as client:
            answer = client.post("/v1/chat/completions", json=body).json()
            assert client.get("/openapi.json").status_code == 200
        assert answer["choices"][0]["message"]["content"] == generated.outputs[0].text, (answer, generated)
        print(generated.outputs[0].text)
""")


SEVERAL = "engine.drafting pooling server.anthropic"


@pytest.mark.parametrize("rooms", quick_rows([SEVERAL, *sorted(OPTIONAL)], quick=(SEVERAL,)))
def test_an_installation_without_an_optional_room_generates_and_serves(rooms, tmp_path):
    copy = tmp_path / "src" / "jaxis"
    for folder in map(Path, jaxis.__path__):  # an editable installation has the native library elsewhere
        shutil.copytree(folder, copy, copy_function=_link, dirs_exist_ok=True)
    (copy.parent / "sitecustomize.py").write_text(NOT_EDITABLE)
    for room in rooms.split():
        path = copy.joinpath(*room.split("."))
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    script = tmp_path / "script.py"
    script.write_text(f"ROOMS = {rooms.split()!r}\n{GENERATE_AND_SERVE}")
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Paris" in ended.stdout


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
