"""`GET /v1/requests`: what an operator sees of unfinished requests, and nobody else."""

import httpx
import openai
import pytest

from tests.server.http.test_api_keys import write_keys

ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


def test_an_admin_sees_what_runs_and_what_waits(serve, tmp_path):
    texts = write_keys(tmp_path / "keys", root={"admin": True}, alice={})
    running = serve(api_key_file=tmp_path / "keys")
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=texts["alice"], max_retries=0, timeout=60)
    with httpx.Client(base_url=running.url, timeout=60) as http:

        def requests(key="root"):
            answer = http.get("/v1/requests", headers={"x-api-key": texts[key]})
            answer.raise_for_status()
            return answer.json()["data"]

        assert requests() == []
        # Eight completions are as many as run at once.
        body = {"model": "jaxis-tiny", "prompt": [5, 6, 7], "stream": True, "extra_body": ENDLESS}
        first = client.completions.create(**body, n=8)
        next(iter(first))
        [found] = requests()
        assert found["state"] == "running"
        assert "alice" in found["client"]
        assert found["prompt_tokens"] == 3
        assert found["generated_tokens"] >= 1
        assert found["computed_tokens"] >= 3
        assert found["waiting_seconds"] >= 0
        assert found["running_seconds"] > 0
        with http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": [8] * 9, "stream": True, **ENDLESS},
            headers={"x-api-key": texts["alice"]},
        ):
            # Its headers came after two seconds without a token.
            states = {each["prompt_tokens"]: each["state"] for each in requests()}
            assert states == {3: "running", 9: "waiting"}
        with pytest.raises(httpx.HTTPStatusError, match="403"):
            requests("alice")
        first.close()
        running.wait_until_idle()
        assert requests() == []
    client.close()


def test_without_such_a_key_nobody_sees_them(http):
    assert http.get("/v1/requests").status_code == 403
