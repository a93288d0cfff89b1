"""`jaxis bench serve` against the real server: it counts what the server counts."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app


@pytest.mark.sampled
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_request_is_measured(serve, endpoint, tmp_path):
    server = serve()  # whose metrics count nothing else
    load = ("--num-prompts", "10", "--random-input-len", "8", "--random-output-len", "6", "--ignore-eos")
    file = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json")
    url = f"{server.url}/v1"
    result = CliRunner().invoke(app, ["bench", "serve", "--base-url", url, "--endpoint", endpoint, *load, *file])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "result.json").read_text())
    assert (report["model_id"], report["completed"], report["failed"]) == ("jaxis-tiny", 10, 0)
    assert report["output_lens"] == [6] * 10
    assert endpoint != "/v1/completions" or report["input_lens"] == [8] * 10
    assert 0 < report["median_ttft_ms"] <= report["median_e2el_ms"]
    counted = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            counted[line.split("{")[0]] = float(line.rsplit(" ", 1)[1])
    # The warm-up's one request is the server's, and not the report's.
    assert counted["jaxis:generation_tokens_total"] == report["total_output_tokens"] + 6
    if endpoint == "/v1/completions":
        assert counted["jaxis:prompt_tokens_total"] == report["total_input_tokens"] + 8
