"""`jaxis verify --against`: changed copies of the served model are told apart by what was changed."""

import json
import re
import shutil
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxis.bringup.verify.against import verify_against
from jaxis.cli.main import app
from jaxis.errors import ConfigError
from tests.support.running_server import running
from tools.json_schemas import FOLDER

TINY = Path(__file__).parents[2] / "src" / "jaxis" / "assets" / "tiny"


def other_template(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ 'You are kind.' }}" + config["chat_template"]
    path.write_text(json.dumps(config))


def other_tokenizer(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    del tokenizer["model"]["merges"][40:]
    path.write_text(json.dumps(tokenizer))


def scaled_weights(folder, amount):
    path = folder / "model.safetensors"
    weights = load_file(path)
    draws = np.random.default_rng(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = 1 + amount * draws.standard_normal(weight.shape).astype(np.float32)
            weights[name] = (weight.astype(np.float32) * noise).astype(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})


CHANGES = {
    "none": lambda folder: None,
    "template": other_template,
    "tokenizer": other_tokenizer,
    "quantization": lambda folder: scaled_weights(folder, 0.05),
    "weights": lambda folder: scaled_weights(folder, 0.6),
}


@pytest.fixture
def plain_server(server):
    """A server without /tokenize, which scores no prompts and gives completions' log-probabilities as chat's."""
    api = FastAPI()

    @api.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str, request: Request):
        body = json.loads(await request.body() or "null")
        if "tokenize" in path or "template" in path or (body or {}).get("echo"):
            return JSONResponse({"error": {"message": "not supported"}}, 404)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            found = (await http.request(request.method, f"/{path}", json=body)).json()
        if path == "v1/completions":
            logprobs = found["choices"][0]["logprobs"]
            found["choices"][0]["logprobs"] = {
                "content": [
                    {"token": token, "logprob": logprob}
                    for token, logprob in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                ]
            }
        return found

    with running(uvicorn.Server(uvicorn.Config(api, log_level="critical"))) as (url, _):
        yield url


@pytest.mark.parametrize("kind", ["vLLM's", "plain"])
@pytest.mark.parametrize("changed", CHANGES)
def test_what_was_changed_is_named(request, tmp_path, kind, changed):
    url = request.getfixturevalue("server").url if kind == "vLLM's" else request.getfixturevalue("plain_server")
    folder = shutil.copytree(TINY, tmp_path / "model")
    CHANGES[changed](folder)
    result = verify_against(str(folder), url)
    codes = {finding.code for finding in result.findings} - {"no_prompt_logprobs"}
    assert changed in codes or (changed == "none" and not codes), result
    assert codes <= {"template", "tokenizer"} if changed == "tokenizer" else len(codes) <= 1, result
    assert result.passed == (changed == "none")
    assert result.to_dict()["status"] == ("verified" if changed == "none" else "differs")
    assert (kind == "plain") == any(finding.code == "no_prompt_logprobs" for finding in result.findings)
    if changed == "template" and kind == "vLLM's":
        assert "'You are kind." in result.findings[0].message


def test_ids_that_are_exchanged_are_another_tokenizer(server, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġin"] = vocabulary["Ġin"], vocabulary["Ġthe"]
    path.write_text(json.dumps(tokenizer))
    finding = verify_against(str(folder), server.url).findings[0]
    assert finding.code == "tokenizer"
    assert re.search(r"token \d+ of the text is \d+ \(.*\) there and \d+ \(.*\) here", finding.message)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:80", "http://[x", "ftp://a"])
def test_an_address_without_a_server_is_one_line(url):
    with pytest.raises(ConfigError, match=r"(?s)^[^\n]*(127.0.0.1|x|ftp)[^\n]*$"):
        verify_against("unused", url)


def test_the_command_answers_in_json_and_by_its_exit_code(server):
    found = CliRunner().invoke(app, ["verify", str(TINY), "--against", f"{server.url}/v1/", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["status"] == "verified"
    jsonschema.validate(json.loads(found.stdout), json.loads((FOLDER / "verify-against.json").read_text()))
    found = CliRunner().invoke(app, ["verify", str(TINY), "--against", server.url, "--against-model", "none", "--json"])
    assert found.exit_code == 3
    assert json.loads(found.stdout)["status"] == "error"
    found = CliRunner().invoke(app, ["verify", str(TINY), "--against", server.url, "--only", "layers"])
    assert found.exit_code == 2
