"""Ollama's API through its own client: a scripted model's answers whole and streamed alike, and what clients send."""

import contextlib
import json
import logging

import httpx
import ollama
import pytest

from jaxis.errors import EngineError
from jaxis.server.http import sse
from tests.support.scripted_engine import TEMPLATE, ScriptedEngine, served

MODEL = "jaxis-tiny"
MESSAGES = [{"role": "user", "content": "Weather in Paris?"}]
THINKING_TEMPLATE = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


def get_weather(city: str, days: list[int]) -> str:
    """Weather of a city.

    Args:
      city: Its name.
      days: From today.
    """
    return f"{city} {days}"


def get_time() -> str:
    """The time."""
    return "noon"


TOOLS = [get_weather, get_time]


@pytest.fixture(scope="module")
def running():
    """A scripted model behind a server, and its address: a server of its own for each test would take seconds."""
    engine = ScriptedEngine(THINKING_TEMPLATE)
    with served(engine) as url:
        yield engine, url


@pytest.fixture
def engine(running):
    engine, _ = running
    engine.text, engine.finish_reason, engine.piece = "", "stop", 3
    engine.prompt = engine.params = engine.grammar = None
    return engine


@pytest.fixture
def connect():
    """Makes pairs of an `ollama` client and an `httpx` one, of a server over an engine; they end with the test."""
    with contextlib.ExitStack() as stack:

        def connect(engine, **settings):
            url = stack.enter_context(served(engine, **settings))
            return ollama.Client(url), stack.enter_context(httpx.Client(base_url=url))

        yield connect


@pytest.fixture
def client(running):
    return ollama.Client(running[1])


@pytest.fixture
def http(running):
    with httpx.Client(base_url=running[1]) as http:
        yield http


def lines_of(response):
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def both(client, **more):
    """A chat's message and reason, seen to be the same whole and streamed."""
    request = {"model": MODEL, "messages": MESSAGES} | more
    whole = client.chat(**request)
    lines = list(client.chat(stream=True, **request))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].message.content == ""
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert "".join(line.message.thinking or "" for line in lines) == (whole.message.thinking or "")
    calls = [call.function for line in lines for call in line.message.tool_calls or ()]
    assert calls == [call.function for call in whole.message.tool_calls or ()]
    assert all(len(line.message.tool_calls or ()) <= 1 for line in lines)
    assert lines[-1].done_reason == whole.done_reason
    assert lines[-1].eval_count == whole.eval_count
    return whole


def test_the_clients_calls_about_models(client, http):
    [model] = client.list().models
    assert (model.model, model.details.format) == (MODEL, "safetensors")
    [loaded] = client.ps().models
    assert (loaded.model, loaded.context_length) == (MODEL, 1000)
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1000
    assert shown.template == THINKING_TEMPLATE
    assert client.pull(MODEL).status == "success"
    assert [line.status for line in client.pull(MODEL, stream=True)][-1] == "success"
    for call in (client.show, client.pull, lambda name: client.chat(name, MESSAGES)):
        with pytest.raises(ollama.ResponseError, match="'other'") as raised:
            call("other")
        assert raised.value.status_code == 404


def test_what_there_is_not_says_so(client, http):
    for call in (
        lambda: client.create("new", from_=MODEL),
        lambda: client.push(MODEL),
        lambda: client.copy(MODEL, "new"),
        lambda: client.delete(MODEL),
    ):
        with pytest.raises(ollama.ResponseError, match="this server does not") as raised:
            call()
        assert raised.value.status_code == 501
    assert http.get("/api/no-such-route").json().keys() == {"error"}


def test_text_is_the_cores(client, engine):
    engine.text = "It is sunny."
    answer = both(client)
    assert (answer.model, answer.message.content, answer.done_reason) == (MODEL, "It is sunny.", "stop")
    assert answer.prompt_eval_count == len(engine.prompt_token_ids)
    assert answer.eval_count == len(engine.text)
    assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration + answer.eval_duration > 0
    engine.finish_reason = "length"
    assert both(client).done_reason == "length"


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_calls_come_whole(client, engine, piece):
    engine.text, engine.piece = f"<think>\nhm\n</think>\n\nI look.\n{CALLS}", piece
    answer = both(client, tools=TOOLS)
    assert (answer.message.content, answer.message.thinking, answer.done_reason) == ("I look.", "hm", "stop")
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == [
        ("get_weather", {"city": "Paris", "days": [1, 2]}),
        ("get_time", {}),
    ]
    assert '"name": "get_weather"' in engine.prompt


def test_a_call_that_was_cut_off_is_left_out(client, engine):
    engine.text, engine.finish_reason = '<tool_call>{"name": "get_weather", "arguments": {"ci', "length"
    answer = both(client, tools=TOOLS)
    assert (answer.message.tool_calls, answer.message.content, answer.done_reason) == (None, "", "length")


def test_calls_and_their_answers_come_back(client, engine):
    """Without ids, as most clients send them: the template sees which answer belongs to which call."""
    calls = [
        {"function": {"name": "get_weather", "arguments": {"city": "Köln"}}},
        {"function": {"name": "get_time", "arguments": {}}},
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_name": "get_time"},
        {"role": "tool", "content": "sunny"},
    ]
    client.chat(MODEL, turns, tools=TOOLS)
    assert "<think>hm</think>" in engine.prompt
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in engine.prompt
    assert "noon(for call00001)" in engine.prompt
    assert "sunny(for call00000)" in engine.prompt
    first = engine.prompt.removesuffix("[assistant]")
    client.chat(MODEL, [*turns, {"role": "assistant", "content": "Sunny."}, *MESSAGES], tools=TOOLS)
    assert engine.prompt.startswith(first)


def test_an_answer_that_has_begun_goes_on(client, engine):
    client.chat(MODEL, [*MESSAGES, {"role": "assistant", "content": "It is"}])
    assert engine.prompt.endswith("[assistant]It is")


def test_format_is_a_grammar(client, engine):
    engine.text = '{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    both(client, format=schema)
    assert engine.params.structured_outputs.json_schema == schema
    assert engine.grammar is not None
    both(client, format="json")
    assert engine.params.structured_outputs.json_object
    client.generate(MODEL, "x", format=schema)
    assert engine.params.structured_outputs.json_schema == schema
    both(client, format="")
    assert engine.params.structured_outputs is None
    with pytest.raises(ollama.ResponseError, match="format"):
        client.chat(MODEL, MESSAGES, format={"type": "no such type"})


def test_think(connect, client, engine):
    engine.text = "<think>hm</think>Sunny."
    assert both(client, think=True).message.thinking == "hm"
    assert both(client).message.thinking == "hm"
    assert "<think></think>" not in engine.prompt
    answer = both(client, think="max")
    assert (answer.message.thinking, engine.prompt[-len("[assistant]<high>") :]) == ("hm", "[assistant]<high>")
    engine.text = "Sunny."
    assert both(client, think=False).message.thinking is None
    assert engine.prompt.endswith("<think></think>")
    plain = connect(ScriptedEngine("{% for message in messages %}{{ message.content }}{% endfor %}"))[0]
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        plain.chat(MODEL, MESSAGES, think=True)
    assert plain.chat(MODEL, MESSAGES, think=False).done
    with pytest.raises(ollama.ResponseError, match="'jaxis-tiny' does not support tools"):
        plain.chat(MODEL, MESSAGES, tools=TOOLS)


def test_thoughts_of_a_model_that_cannot_stop_thinking_are_left_out(client, engine):
    engine.text = "<think>hm</think>Sunny."
    answer = both(client, think=False)
    assert answer.message.thinking is None
    assert "hm" not in answer.message.content


def test_generate(client, engine):
    engine.text = "<think>hm</think>Sunny."
    answer = client.generate(MODEL, "Weather?", system="Be brief.")
    assert (answer.response, answer.thinking, answer.done_reason) == ("Sunny.", "hm", "stop")
    assert engine.prompt.startswith("[system]Be brief.[user]Weather?")
    lines = list(client.generate(MODEL, "Weather?", stream=True))
    assert "".join(line.response for line in lines) == "Sunny."
    assert "".join(line.thinking or "" for line in lines) == "hm"
    answer = client.generate(MODEL, "Weather?", raw=True)
    assert (answer.response, answer.thinking, engine.prompt) == ("<think>hm</think>Sunny.", None, "Weather?")
    assert engine.params.max_tokens > 10**6
    assert client.generate(MODEL, "Weather?", raw=True, options={"num_predict": 3}).done
    assert engine.params.max_tokens == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "x"}, "template"),
        ({"context": [1]}, "context"),
        ({"images": ["aGk="]}, "does not support image input"),
        ({"raw": True, "system": "x"}, "system"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"options": {"num_predict": "5"}}, "options.num_predict"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"format": "yaml"}, "format"),
    ],
)
def test_what_cannot_be_honoured_is_refused(http, more, words):
    response = http.post("/api/generate", json={"model": MODEL, "prompt": "x", **more})
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_options(client, engine, caplog):
    options = {
        **{"temperature": 0, "top_k": 0, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["END"], "num_predict": 7.0},
        **{"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    }
    client.chat(MODEL, MESSAGES, options=options)
    params = engine.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0, 0, 0.5, 0.1, 3)
    assert (params.stop, params.max_tokens, params.repetition_penalty) == (["END"], 7, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    unlimited = {"num_predict": -1, "seed": -1, "top_k": -1, "repeat_penalty": 1.1, "repeat_last_n": 0}
    client.chat(MODEL, MESSAGES, options=unlimited)
    params = engine.params
    assert (params.max_tokens, params.seed, params.top_k, params.repetition_penalty) == (None, None, 0, 1.0)


def test_options_without_effect_are_named_once(http, caplog):
    body = {"model": MODEL, "messages": MESSAGES, "options": {"num_gpu": 1, "num_ctx": 4096, "mirostat_tau": None}}
    with caplog.at_level(logging.INFO, "jaxis.server"):
        for _ in range(2):
            response = http.post("/api/chat", json=body)
            assert response.headers["x-jaxis-ignored"] == "options.num_gpu,options.num_ctx"
    messages = [record.getMessage() for record in caplog.records]
    assert sum("num_gpu" in message for message in messages) == 1
    assert sum("num_ctx=4096" in message and "1000 tokens" in message for message in messages) == 1


@pytest.mark.parametrize("more", [{}, {"truncate": True}, {"options": {"num_ctx": 100}}])
def test_a_prompt_that_is_too_long_is_never_cut(http, more):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 1000}], **more}
    response = http.post("/api/chat", json=body)
    assert response.status_code == 400
    assert "maximum context length is 1000 tokens" in response.json()["error"]


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0", "unload")]
)
def test_loading_and_unloading_are_acknowledged(http, engine, keep_alive, reason):
    for path, more in (("chat", {"messages": []}), ("generate", {}), ("generate", {"prompt": ""})):
        [line] = lines_of(http.post(f"/api/{path}", json={"model": MODEL, "keep_alive": keep_alive, **more}))
        assert (line["done"], line["done_reason"]) == (True, reason)
    assert engine.prompt is None


def test_names_are_as_the_client_writes_them(connect, engine):
    client, http = connect(engine, served_model_names=("one", "two:7b"), model_aliases=("gpt-*",))
    assert [model.model for model in client.list().models] == ["one", "two:7b"]
    for name in ("one", "one:latest", "two:7b", "gpt-5"):
        assert client.chat(name, MESSAGES).model == name
        answer = http.post("/v1/chat/completions", json={"model": name, "messages": MESSAGES})
        assert answer.json()["model"] == name
        assert client.show(name).modelinfo["general.basename"] == name
    assert http.post("/api/chat", json={"messages": MESSAGES, "stream": False}).json()["model"] == "one"


def test_logprobs_are_those_of_chat(serve):
    client = ollama.Client(serve().url)
    request = {"model": MODEL, "messages": MESSAGES, "options": {"num_predict": 4}, "logprobs": True, "top_logprobs": 2}
    whole = client.chat(**request).logprobs
    streamed = [position for line in client.chat(stream=True, **request) for position in line.logprobs or ()]
    assert streamed == whole
    assert len(whole) == 4
    assert all(len(position.top_logprobs) == 2 for position in whole)


def test_the_embedded_models_answer_is_that_of_chat(serve):
    """A real engine and sockets: VS Code's sequence, then the same question through both APIs."""
    url = serve().url
    with httpx.Client(base_url=url) as http:
        major, minor, _ = map(int, http.get("/api/version").json()["version"].split("."))
        assert (major, minor) >= (0, 7)  # VS Code asks for 0.6.4
        [model] = http.get("/api/tags").json()["models"]
        shown = http.post("/api/show", json={"model": model["model"]}).json()
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] > 0
        assert model["size"] > 0
        assert shown["details"]["parameter_size"][-1] in "KM"
        body = {"model": model["model"], "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
        lines = lines_of(http.post("/api/chat", json=body))
        assert "".join(line["message"]["content"] for line in lines) == choice["message"]["content"]
        assert "Paris" in choice["message"]["content"]
        assert http.get("/").text == "Ollama is running"
        assert http.head("/").status_code == 200
        assert "<html" in http.get("/", headers={"Accept": "text/html,*/*;q=0.8"}).text


def test_requests_of_known_shapes(http, engine):
    """Bodies of Open WebUI, LangChain's ChatOllama, Home Assistant and curl."""
    engine.text = "Hi."
    nulls = dict.fromkeys(("mirostat", "num_ctx", "num_gpu", "num_predict", "temperature", "stop", "top_k", "tfs_z"))
    bodies = [
        {"model": MODEL, "messages": MESSAGES, "options": {}, "stream": True, "metadata": {"chat_id": "1"}},
        {"model": MODEL, "messages": MESSAGES, "options": nulls, "tools": [], "format": None, "keep_alive": None},
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be kind.", "images": []}, {**MESSAGES[0], "images": None}],
            "options": {"num_ctx": 900},
            "keep_alive": "-1s",
            "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}],
        },
    ]
    for body in bodies:
        lines = lines_of(http.post("/api/chat", json=body))
        assert "".join(line["message"]["content"] for line in lines) == "Hi."
    as_form = {"content-type": "application/x-www-form-urlencoded"}
    content = json.dumps(bodies[0])
    assert http.post("/api/chat", content=content, headers=as_form).status_code == 200
    from_a_page = {**as_form, "origin": "https://evil.example"}
    assert http.post("/api/chat", content=content, headers=from_a_page).status_code == 400


def test_keys_and_the_flag(connect, engine):
    _, http = connect(engine, api_keys=("k",))
    for method, path in (("GET", "/api/version"), ("GET", "/api/tags"), ("POST", "/api/chat"), ("POST", "/api/embed")):
        response = http.request(method, path)
        assert response.status_code == 401
        assert response.json().keys() == {"error"}
        assert "API key" in response.json()["error"]
    assert http.get("/api/tags", headers={"Authorization": "Bearer k"}).status_code == 200
    _, without = connect(engine, ollama_api=False)
    assert without.get("/api/tags").status_code == 404
    assert "<html" in without.get("/").text
    _, no_page = connect(engine, webui=False)
    assert no_page.get("/").text == "Ollama is running"


def test_a_stream_that_waits_is_not_silent(connect, monkeypatch):
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", 0.05)
    engine = ScriptedEngine()
    engine.text, engine.delay_seconds = "Yes.", 0.4
    client, http = connect(engine, sse_keep_alive_seconds=0.05)
    lines = list(client.chat(MODEL, MESSAGES, stream=True))
    assert [line.message.content for line in lines[:2]] == ["", ""]
    assert "".join(line.message.content for line in lines) == "Yes."
    engine.error = EngineError("no memory")
    *waiting, last = lines_of(http.post("/api/generate", json={"model": MODEL, "prompt": "x"}))
    assert {line["response"] for line in waiting} == {""}
    assert last == {"error": "no memory"}


def test_a_failure_in_a_stream_is_its_last_line(http, engine, monkeypatch):
    engine.text = "Some words that do not end well."
    generate = engine.generate

    async def failing(*args, **kwargs):
        async for output in generate(*args, **kwargs):
            yield output
            raise RuntimeError("no power")

    monkeypatch.setattr(engine, "generate", failing)
    [first, last] = lines_of(http.post("/api/chat", json={"model": MODEL, "messages": MESSAGES}))
    assert first["message"]["content"]
    assert last.keys() == {"error"}
    assert "no power" not in last["error"]
