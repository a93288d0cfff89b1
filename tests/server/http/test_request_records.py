"""The request log: what its lines say, and how the file is kept."""

import json
import logging
import os
import stat
import threading

import httpx
import pytest

from jaxis.errors import ConfigError
from jaxis.server.http import request_records
from jaxis.server.http.api_keys import new_api_key, to_yaml
from jaxis.server.http.request_records import RequestLogFile
from tests.support.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def lines_of(path, number):
    """The log, once it has so many lines: they are written after the answers."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= number)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_key_and_the_usage_and_no_content(serve, tmp_path):
    text, key = new_api_key("alice")
    (tmp_path / "keys").write_text(to_yaml(key))
    server = serve(api_key_file=tmp_path / "keys", request_log=tmp_path / "log")
    headers = {"Authorization": f"Bearer {text}"}
    requests = {
        "chat": ("/v1/chat/completions", CHAT),
        "batch": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "ignore_eos": True}),
        "stream": ("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 4, "ignore_eos": True}),
        "wrong": ("/v1/chat/completions", {"messages": []}),
    }
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        answers = {
            name: http.post(path, json=body, headers={"X-Request-Id": name}) for name, (path, body) in requests.items()
        }
        http.get("/health")
        http.get("/v1/models", headers={"X-Request-Id": "models"})
    answer = answers["chat"].json()
    lines = {line["request_id"]: line for line in lines_of(tmp_path / "log", 5)}
    chat, batch, stream, wrong, models = (lines[name] for name in (*requests, "models"))
    usage = answer["usage"]
    assert {name: chat[name] for name in ("key", "method", "path", "status")} == {
        "key": "alice",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
    }
    assert (chat["prompt_tokens"], chat["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert chat["finish_reasons"] == ["stop"]
    assert chat["seconds"] > 0
    assert (batch["completion_tokens"], batch["finish_reasons"]) == (12, ["length"] * 4)
    assert (stream["completion_tokens"], stream["finish_reasons"]) == (4, ["length"])
    assert (wrong["status"], wrong["completion_tokens"]) == (400, 0)
    assert (models["path"], models["status"]) == ("/v1/models", 200)
    log = (tmp_path / "log").read_text()
    assert not any(words in log for words in ("France", "Paris", text))
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_full_adds_the_question_and_the_answer_without_images(serve, tmp_path):
    server = serve(request_log=tmp_path / "log", request_log_level="full")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2000}}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        with_image = {"messages": [{"role": "user", "content": [image]}]}
        for number, body in enumerate((CHAT, CHAT | {"stream": True}, with_image)):
            http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": str(number)})
        headers = {"Content-Type": "application/json", "X-Request-Id": "3"}
        http.post("/v1/completions", content=b"{", headers=headers)
    lines = sorted(lines_of(tmp_path / "log", 4), key=lambda line: line["request_id"])
    whole, stream, refused, broken = lines
    assert whole["request"] == CHAT
    assert whole["answers"] == stream["answers"] == ["The capital of France is Paris."]
    assert (refused["status"], refused["answers"]) == (400, [])
    assert "AAAA" not in json.dumps(refused)
    assert "image/png" in json.dumps(refused["request"])
    assert broken["request"] == "[1 bytes that are not JSON]"


def test_an_abandoned_stream_is_logged_with_what_it_took(serve, tmp_path):
    server = serve(request_log=tmp_path / "log")
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    [line] = lines_of(tmp_path / "log", 1)
    assert 0 < line["completion_tokens"] < 1900
    assert line["finish_reasons"] == []


def test_a_full_file_is_renamed_and_a_renamed_one_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(request_records, "MAX_FILE_BYTES", 2000)
    path = tmp_path / "log"
    path.touch(mode=0o644)
    log = RequestLogFile(path)
    for number in range(400):
        log.write({"number": number, "text": "x" * 30})
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["log", "log.1", "log.2", "log.3", "log.4", "log.5"]
    assert all(file.stat().st_size <= 2000 for file in tmp_path.iterdir())
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in tmp_path.iterdir())
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 399
    path.rename(tmp_path / "elsewhere")
    log.reopen()
    log.write({"number": 400})
    assert json.loads(path.read_text()) == {"number": 400}
    log.close()


def test_lines_of_several_threads_do_not_mix(tmp_path):
    log = RequestLogFile(tmp_path / "log")
    threads = [threading.Thread(target=lambda: [log.write({"text": "y" * 9000}) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert all(len(json.loads(line)["text"]) == 9000 for line in (tmp_path / "log").read_text().splitlines())


def test_a_log_that_cannot_be_written_is_reported_once_and_stops_nothing(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"--request-log .*nowhere/log cannot be written: No such file"):
        RequestLogFile(tmp_path / "nowhere" / "log")
    if os.path.exists("/dev/full"):
        log = RequestLogFile(tmp_path / "log")
        log.stream.close()
        log.stream = open("/dev/full", "a")  # noqa: SIM115 (the log closes it)
        caplog.set_level(logging.WARNING)
        for _ in range(3):
            log.write({"a": 1})
        [message] = caplog.messages
        assert "No space left on device" in message
