"""`jaxis serve`: what it prints works as printed, and signals end it in good order."""

import json
import shlex
import signal
import socket
import subprocess
import threading

import httpx
import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.server.http.api_keys import new_api_key, to_yaml
from tests.support.cli_model import JAXIS
from tests.support.waiting import wait_until

SMALL = ("--port", "0", "--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "64", "--max-num-seqs", "4")


@pytest.fixture
def start(cli_environment):
    """Starts the command and waits for its last line of the start; returns the process and the lines."""
    processes = []

    def run(*arguments):
        process = subprocess.Popen(
            [*JAXIS, "serve", *SMALL, *arguments], stderr=subprocess.PIPE, text=True, env=cli_environment
        )
        processes.append(process)
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if "curl" in line:
                break
        assert lines, "it printed nothing"
        return process, lines

    yield run
    for process in processes:
        process.kill()
        process.wait()


def test_printed_request_works_and_sigterm_lets_requests_end(start):
    process, lines = start("--drain-timeout", "20", "--log-format", "json")
    assert lines[0] == "model:  jaxis-tiny"
    assert "4 completions at once" in lines[1]
    answer = subprocess.run(shlex.split(lines[-1]), capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(answer)["choices"][0]["message"]["content"] == "The capital of France is Paris."

    url, page = lines[2].split()[1], lines[3].split()[1]
    assert "<title>jaxis</title>" in httpx.get(page, headers={"Accept": "text/html"}).text  # no line in the log
    with httpx.stream(
        "POST",
        f"{url}/completions",
        json={"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True},
        timeout=60,
    ) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: {")
        process.send_signal(signal.SIGTERM)
        assert [line for line in events if line][-1] == "data: [DONE]"
    # Read what is left, so that the process cannot wait for a reader of its log.
    log = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr))
    reader.start()
    assert process.wait(30) == 0
    reader.join(10)
    requests = [json.loads(line) for line in log if line.startswith("{")]
    assert [(line["path"], line["status"]) for line in requests] == [
        ("/v1/chat/completions", 200),
        ("/v1/completions", 200),
    ]
    assert log[-1] == "stopped\n"


def test_sigkill_closes_connections_and_the_same_address_serves_again(start, tmp_path):
    process, lines = start()
    url = lines[2].split()[1]
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: {")
        process.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    process.wait()
    check_that_sighup_reloads(start, url, tmp_path)


def check_that_sighup_reloads(start, url, tmp_path):
    """Starts a server at the same address, with a file of keys and a request log, and replaces both."""
    keys, log = tmp_path / "keys", tmp_path / "log"

    def ask(key):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "x", "max_tokens": 1}
        return httpx.post(f"{url}/completions", json=body, headers=headers, timeout=60).status_code

    old, entry = new_api_key("old")
    keys.write_text(to_yaml(entry))
    files = ("--api-key-file", str(keys), "--request-log", str(log))
    process, lines = start("--port", url.split(":")[2].split("/")[0], *files)
    assert lines[2] == f"url:    {url}  (API key needed)"
    assert 'Authorization: Bearer $JAXIS_API_KEY"' in lines[-1]
    assert (ask(old), ask("another")) == (200, 401)
    wait_until(lambda: log.read_text())
    log.rename(tmp_path / "old-log")
    new, entry = new_api_key("new")
    keys.write_text(to_yaml(entry))
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: ask(new) == 200)
    assert ask(old) == 401
    wait_until(lambda: log.exists() and log.read_text())
    assert json.loads(log.read_text().splitlines()[-1])["key"] == "new"
    assert json.loads((tmp_path / "old-log").read_text().splitlines()[0])["key"] == "old"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", ""], "--api-key"),
        (["--api-key-file", "nowhere.txt"], "nowhere.txt"),
        (["--ssl-certfile", "cert.pem"], "--ssl-keyfile"),
        (["--max-body-size", "many"], "--max-body-size"),
        (["--metrics-prefix", "a b"], "--metrics-prefix"),
        (["--host", "203.0.113.1"], "203.0.113.1"),
    ],
)
def test_mistakes_are_errors_of_one_line_before_the_model_loads(arguments, message, monkeypatch):
    monkeypatch.setattr("jaxis.engine.setup.build_engine", lambda *_: pytest.fail("loaded"))
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("jaxis: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--data-parallel-rank=1", "--data-parallel-size"),
        ("--data-parallel-address=10.0.0.1", "--master-addr"),
        ("--enable-eplb", "--enable-expert-parallel"),
    ],
)
def test_options_for_another_way_to_spread_a_model_are_refused_with_what_to_give(option, instead):
    result = CliRunner().invoke(app, ["serve", option])
    assert result.exit_code == 2
    assert f"{option.partition('=')[0]} is not supported" in result.stderr
    assert instead in result.stderr


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr("jaxis.engine.setup.build_engine", lambda *_: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.stderr
