"""Models that are loaded: on demand and once, by memory, by time, by request; engines are fake."""

import math

import pytest

from jaxis.errors import CheckpointError, ConfigError, RequestError
from jaxis.server.several import pool as pools
from jaxis.server.several import slot as slots
from jaxis.server.several.model_settings import PoolLimits, parse_duration
from tests.server.several.model_pools import GIB, FakeModel, in_thread, serving_pool
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Other programs take nothing; set it to say what is free."""
    free = {"bytes": 10**6 * GIB}
    monkeypatch.setattr(pools, "free_host_bytes", lambda: free["bytes"])
    return free


def test_requests_that_come_together_load_their_model_once_and_are_told_that_they_waited():
    with serving_pool(a := FakeModel("a"), b := FakeModel("b")) as client:
        a.may_load.clear()
        asks = [client.asking("a") for _ in range(8)]
        client.wait_for("a", "loading")
        a.may_load.set()
        answers = [ask() for ask in asks]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(float(answer.headers["X-Jaxis-Load"]) >= 0 for answer in answers)
        assert all(answer.json()["model"] == "a" for answer in answers)
        assert "X-Jaxis-Load" not in client.ask("a").headers
        assert (a.num_loads, b.num_loads) == (1, 0)
        assert client.states() == {"a": "loaded", "b": "unloaded"}
        assert client.http.get("/load").json() == {"server_load": 0}


def test_a_name_counts_before_a_pattern_and_without_a_name_nothing_is_guessed():
    with serving_pool(FakeModel("a", aliases=("b*", "gpt-*")), FakeModel("b")) as client:
        assert client.ask("b:latest").json()["model"] == "b:latest"
        assert client.loaded() == {"b"}
        assert client.ask("gpt-5").json()["model"] == "gpt-5"
        missing, unknown = client.ask(None), client.ask("c")
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
        assert "a, b" in missing.json()["error"]["message"]
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "available: a, b" in unknown.json()["error"]["message"]
        assert client.ask(3).status_code == 400
        assert client.http.get("/props", params={"model": "b"}).json()["model_alias"] == "b"
        assert client.http.get("/props").status_code == 400
        assert client.http.get("/v1/models/c").status_code == 404
        text = client.http.post("/v1/completions", content='{"model": "a"}', headers={"Content-Type": "text/plain"})
        assert text.status_code == 400


def test_the_least_recently_used_idle_model_makes_room():
    with serving_pool(*(FakeModel(name) for name in "abc"), free_bytes=int(2.5 * GIB)) as client:
        for name in "aba":
            assert client.ask(name).status_code == 200
        assert client.ask("c").status_code == 200
        assert client.loaded() == {"a", "c"}
        assert [model.num_loads for model in client.models.values()] == [1, 1, 1]


def test_a_pinned_model_is_loaded_at_the_start_and_stays():
    with serving_pool(
        FakeModel("a", pinned=True, idle_seconds=0.0), FakeModel("b"), FakeModel("c"), most_loaded=2
    ) as client:
        client.wait_for("a", "loaded")
        for name in "bcb":
            assert client.ask(name).status_code == 200
        assert client.loaded() == {"a", "b"}
    with serving_pool(FakeModel("a", pinned=True), FakeModel("b"), most_loaded=1) as client:
        client.wait_for("a", "loaded")
        assert "pinned" in client.ask("b").json()["error"]["message"]


def test_what_cannot_fit_is_refused_in_one_line_and_unloads_nothing():
    with serving_pool(FakeModel("a"), FakeModel("b", needed_bytes=9 * GIB), free_bytes=5 * GIB) as client:
        client.ask("a")
        answer = client.ask("b")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        message = answer.json()["error"]["message"]
        assert "'b' cannot be loaded: it takes 9.0 GiB of memory, and 4.5 GiB can be used" in message
        assert "\n" not in message
        assert client.loaded() == {"a"}


def test_memory_that_other_programs_took_counts(memory):
    with serving_pool(FakeModel("a"), FakeModel("b"), free_bytes=100 * GIB) as client:
        client.ask("a")
        memory["bytes"] = GIB // 2
        assert "512.0 MiB can be used" in client.ask("b").json()["error"]["message"]
        assert client.loaded() == set()


def test_a_model_waits_for_room_that_a_running_request_holds():
    with serving_pool(a := FakeModel("a"), b := FakeModel("b"), free_bytes=int(1.5 * GIB)) as client:
        client.ask("a")
        a.may_step.clear()
        running = client.asking("a")
        wait_until(lambda: client.http.get("/load").json()["server_load"] == 1)
        waiting = client.asking("b")
        wait_until(lambda: b.num_loads == 1)
        assert client.states() == {"a": "loaded", "b": "loading"}
        a.may_step.set()
        assert (running().status_code, waiting().status_code) == (200, 200)
        assert client.loaded() == {"b"}


def test_an_unload_waits_for_running_requests_and_later_ones_load_again():
    with serving_pool(a := FakeModel("a")) as client:
        client.ask("a")
        a.may_step.clear()
        running = client.asking("a", max_tokens=3)
        wait_until(lambda: client.http.get("/load").json()["server_load"] == 1)
        keep_alive = {"model": "a", "keep_alive": 0, "stream": False}
        second = client.asking("a", prompt=[2])  # comes before the unload
        wait_until(lambda: client.http.get("/load").json()["server_load"] == 2)
        unloaded = in_thread(lambda: client.http.post("/api/generate", json=keep_alive))
        client.wait_for("a", "unloading")
        later = client.asking("a")
        a.may_step.set()
        assert (running().json()["usage"]["completion_tokens"], second().status_code) == (3, 200)
        assert unloaded().json()["done_reason"] == "unload"
        assert later().status_code == 200
        assert a.num_loads == 2


def test_a_model_goes_when_nobody_has_asked_for_it_in_a_while():
    with serving_pool(FakeModel("a", idle_seconds=0.01), FakeModel("b", idle_seconds=600.0)) as client:
        client.ask("a")
        client.ask("b")
        client.wait_for("a", "unloaded")
        [entry] = client.http.get("/api/ps").json()["models"]
        assert (entry["name"], entry["expires_at"][:3]) == ("b", "202")
        client.http.post("/api/generate", json={"model": "b", "keep_alive": -1})
        [entry] = client.http.get("/api/ps").json()["models"]
        assert entry["expires_at"][:4] == "2318"
        client.http.post("/api/generate", json={"model": "b", "keep_alive": "10ms"})
        client.wait_for("b", "unloaded")
        assert client.http.get("/api/ps").json() == {"models": []}
        assert [entry["name"] for entry in client.http.get("/api/tags").json()["models"]] == ["a", "b"]
        wrong = client.http.post("/api/generate", json={"model": "b", "keep_alive": "soon"})
        assert wrong.status_code == 400
        assert "keep_alive" in wrong.json()["error"]


def test_a_load_that_fails_is_told_once_tried_again_later_and_no_other_models_concern(monkeypatch):
    a, b = FakeModel("a"), FakeModel("b")
    a.error = CheckpointError("config.json is missing: here\nmore")
    with serving_pool(a, b) as client:
        for _ in range(2):
            answer = client.ask("a")
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "the model 'a' cannot be loaded: config.json is missing: here"
        assert a.num_loads == 1
        assert client.ask("b").status_code == 200
        assert client.http.get("/health").status_code == 200
        assert client.http.post("/models/load", json={"model": "a"}).status_code == 500
        assert a.num_loads == 2
        a.error = None
        monkeypatch.setattr(slots, "RETRY_SECONDS", 0.0)
        assert client.ask("a").status_code == 200


def test_a_request_does_not_wait_for_ever_and_the_load_goes_on():
    with serving_pool(a := FakeModel("a"), request_timeout_seconds=0.05) as client:
        a.may_load.clear()
        answer = client.ask("a")
        assert answer.status_code == 504
        assert "still being loaded" in answer.json()["error"]["message"]
        a.may_load.set()
        client.wait_for("a", "loaded")


def test_an_invalid_request_loads_nothing():
    with serving_pool(a := FakeModel("a")) as client:
        answer = client.ask("a", max_tokens="many")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
        assert client.http.post("/v1/chat/completions", json={"model": "a"}).status_code == 400
        assert a.num_loads == 0


def test_llama_servers_routes_load_and_unload():
    with serving_pool(a := FakeModel("a")) as client:
        for _ in range(2):
            assert client.http.post("/models/load", json={"model": "a"}).json() == {"success": True}
        assert client.http.get("/models").json()["data"][0]["status"] == {"value": "loaded"}
        for _ in range(2):
            assert client.http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
        assert (client.states(), a.num_loads) == ({"a": "unloaded"}, 1)
        assert client.http.post("/models/load", json={"model": "x"}).status_code == 404
        assert client.http.post("/models/load", json={}).status_code == 400


def test_what_is_known_of_a_model_stays_known_and_its_counts_go_on():
    with serving_pool(FakeModel("a"), FakeModel("b")) as client:
        assert "max_model_len" not in client.http.get("/v1/models/a").json()
        for _ in range(2):
            client.ask("a")
            client.http.post("/models/unload", json={"model": "a"})
        assert client.http.get("/v1/models/a").json()["max_model_len"] == 1000
        assert client.http.post("/api/show", json={"model": "a"}).json()["model_info"]["unknown.context_length"] == 1000
        client.ask("b")
        metrics = client.http.get("/metrics").text
        assert metrics.count("# TYPE jaxis:generation_tokens_total counter") == 1
        for line in ('generation_tokens_total{model_name="a"} 2.0', 'generation_tokens_total{model_name="b"} 1.0'):
            assert f"jaxis:{line}\n" in metrics
        assert 'jaxis:num_requests_running{model_name="b"}' in metrics
        assert 'jaxis:num_requests_running{model_name="a"}' not in metrics


def test_keys_and_limits_are_for_all_models():
    with serving_pool(a := FakeModel("a"), api_keys=("k",)) as client:
        for path in ("/v1/completions", "/models/load", "/models/unload", "/api/generate"):
            assert client.http.post(path, json={"model": "a", "prompt": [1]}).status_code == 401
        assert a.num_loads == 0
        client.http.headers["Authorization"] = "Bearer k"
        assert client.ask("a").status_code == 200


def test_shutting_down_refuses_those_that_wait():
    with serving_pool(a := FakeModel("a")) as client:
        a.may_load.clear()
        waiting = client.asking("a")
        client.wait_for("a", "loading")
        client.server.should_exit = True
        assert waiting().status_code == 503


def test_two_models_of_one_name_are_an_error():
    with pytest.raises(ConfigError, match="both called 'a'"), serving_pool(FakeModel("a"), FakeModel("a")):
        pass


def test_each_model_has_an_equal_share_of_those_that_can_be_loaded_at_once():
    assert PoolLimits(free_bytes=100).budget(4).share_bytes == 25
    assert PoolLimits(free_bytes=100, most_loaded=2).budget(4).share_bytes == 50
    assert PoolLimits(free_bytes=100, most_loaded=9).budget(4).total_bytes == 100


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((5, 5), (0, 0), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf)),
        *(("90", 90), ("1h30m", 5400), ("1.5s", 1.5), ("300ms", 0.3), ("0s", 0)),
    ],
)
def test_durations_are_ollamas(value, seconds):
    assert parse_duration(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "5x", "m", "1 m", "-"])
def test_other_durations_are_refused(value):
    with pytest.raises(RequestError, match="keep_alive"):
        parse_duration(value)
