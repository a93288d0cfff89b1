"""The chat page in a browser, against a real server."""

import hashlib
import json
import re
from pathlib import Path

import httpx
import pytest

import jaxis
from jaxis.server.routes.chat_page import chat_page_paths
from tests.support.quick_rows import quick_rows

STATIC = Path(jaxis.__file__).parent / "server" / "static"
QUESTION = "What is the capital of France?"
DONE = "document.querySelector('.assistant .actions')?.children.length > 0"


def open_page(tab, url):
    tab.goto(url)
    tab.wait_for("document.getElementById('model').value === 'jaxis-tiny'")


def ask(tab, text=QUESTION):
    tab.type("#prompt", text)
    tab.press("Enter")


def change_settings(tab, **fields):
    """Fills fields of the settings by their ids, and saves."""
    tab.click("#open-settings")
    for name, value in fields.items():
        tab.type(f"#{name.replace('_', '-')}", value)
    tab.click("#save-settings")


@pytest.fixture
def page(tab, server):
    """The page of a server, loaded."""
    open_page(tab, server.url)
    yield tab
    assert tab.problems() == []
    assert all(url.startswith((server.url, "about:")) for url, _ in tab.requested()), "the page asks another host"


def test_files_are_open_and_the_api_is_not(serve):
    server = serve(api_keys=("secret",))
    with httpx.Client(base_url=server.url, headers={"Accept": "text/html"}) as http:
        paths = chat_page_paths()
        assert {"/", "/favicon.ico", "/static/js/main.js", "/static/vendor/purify.js"} <= paths
        for path in paths:
            response = http.get(path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
        unchanged = http.get("/", headers={"If-None-Match": http.get("/").headers["etag"]})
        assert unchanged.status_code == 304
        assert http.get("/favicon.ico").headers["content-type"] == "image/svg+xml"
        for path in ("/v1/models", "/metrics", "/static/none.js", "/static", "/static/%2e%2e/auth.py"):
            assert http.get(path).status_code == 401, path
        http.headers["Authorization"] = "Bearer secret"
        for path in ("/static/none.js", "/static/%2e%2e/auth.py", "/static/..%2fauth.py"):
            assert http.get(path).status_code == 404, path


def test_libraries_are_those_that_their_readme_names():
    readme = (STATIC / "vendor" / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| \[.* `(\w{64})` \|$", readme, re.MULTILINE)
    found = set()
    for name, digest in rows:
        place = STATIC / "vendor" / name
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        found.update(files)
        assert hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() == digest, name
    vendored = {file for file in (STATIC / "vendor").rglob("*") if file.is_file()}
    assert {file for file in vendored - found if not file.name.startswith(("README", "LICENSE"))} == set()


def test_the_page_can_be_left_out(serve):
    with httpx.Client(base_url=serve(webui=False, ollama_api=False).url) as http:
        assert http.get("/").status_code == 404
        assert http.get("/static/js/main.js").status_code == 404
        assert http.get("/v1/models").status_code == 200


def test_an_answer_is_the_apis_and_survives_a_reload(page, server, client):
    messages = [{"role": "user", "content": QUESTION}]
    expected = client.chat.completions.create(model="jaxis-tiny", messages=messages)
    ask(page)
    page.wait_for(DONE)
    assert page.text(".assistant .content").strip() == expected.choices[0].message.content.strip()
    stats = page.text(".assistant .stats")
    assert f"{expected.usage.completion_tokens} tokens" in stats
    assert f"prompt {expected.usage.prompt_tokens}" in stats
    assert "first after" in stats
    address = page.evaluate("location.href")
    page.goto(address)
    page.wait_for("document.querySelectorAll('.message').length === 2")
    assert page.text(".user .plain") == QUESTION
    assert page.text(".assistant .stats") == stats
    assert page.text("#conversations") == QUESTION
    # It goes on with what was stored.
    ask(page, "And of Spain?")
    page.wait_for("document.querySelectorAll('.assistant').length === 2")
    server.wait_until_idle()
    roles = [message["role"] for message in page.requested()[-1][1]["messages"]]
    assert roles == ["user", "assistant", "user"]


@pytest.mark.parametrize("how", quick_rows(["Escape", "button", "left page"], quick=["Escape"]))
def test_stopping_frees_the_server_and_keeps_what_came(tab, serve, how):
    server = serve()
    open_page(tab, server.url)
    change_settings(tab, extra='{"ignore_eos": true}')
    ask(tab)
    tab.wait_for("document.querySelector('.assistant .content').innerText.length > 20")
    if how == "Escape":
        tab.press("Escape")
    elif how == "button":
        tab.click("#send")
    else:
        address = tab.evaluate("location.href")
        tab.leave()
        server.wait_until_idle()
        open_page(tab, address)
    tab.wait_for(DONE)
    server.wait_until_idle()
    assert len(tab.text(".assistant .content")) > 20
    assert "stopped" in tab.text(".assistant .stats"), "it ended by itself"
    assert tab.evaluate("document.querySelector('.assistant [aria-label=Continue]') !== null")


def test_settings_reach_the_server(page, server):
    defaults = server.engine.info.default_sampling_params
    assert float(page.evaluate("document.getElementById('parameter-top_p').placeholder")) == defaults.top_p
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 3, "seed": 11}
    sent |= {"frequency_penalty": 0.25, "presence_penalty": -0.5, "repetition_penalty": 1.1}
    page.click("#open-settings")
    for name, value in sent.items():
        page.type(f"#parameter-{name}", str(value))
    page.type("#system-prompt", "Be brief.")
    page.type("#stop", "END\n\\n\\n")
    page.type("#parameter-top_p", "2")
    page.click("#save-settings")
    assert page.text("#settings-error") == "Top p must be a number from 0 to 1."
    page.type("#parameter-top_p", "0.9")
    page.type("#parameter-seed", "1.5")
    page.click("#save-settings")
    assert page.text("#settings-error") == "Seed must be a whole number."
    page.type("#parameter-seed", "11")
    for wrong, fault in (("{", "not JSON"), ("[]", "an object"), ('{"n": 2}', "sets n itself")):
        page.type("#extra", wrong)
        page.click("#save-settings")
        assert fault in page.text("#settings-error")
    page.type("#extra", '{"min_tokens": 2}')
    page.click("#save-settings")
    ask(page)
    page.wait_for(DONE)
    body = next(body for url, body in page.requested() if url.endswith("/v1/chat/completions"))
    assert {name: body[name] for name in sent} == sent
    assert body["stop"] == ["END", "\n\n"]
    assert body["min_tokens"] == 2
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert body["model"] == "jaxis-tiny"
    tokens = int(page.text(".assistant .stats").split(" tokens ")[0].split()[-1])
    assert 2 <= tokens <= 3


def test_the_key_is_asked_for_and_kept_for_the_session(tab, serve):
    server = serve(api_keys=("right-key",))
    tab.goto(server.url)
    tab.wait_for("document.getElementById('settings').open")
    assert tab.text("#settings-error") == "The server asks for an API key."
    tab.click("#cancel-settings")
    ask(tab)  # keeps what was typed, and asks again
    tab.wait_for("document.getElementById('settings').open")
    tab.type("#api-key", "wrong")
    tab.click("#save-settings")
    tab.wait_for("document.getElementById('settings-error').innerText === 'The server does not take this API key.'")
    tab.type("#api-key", "right-key")
    tab.click("#save-settings")
    tab.wait_for(DONE)
    tab.wait_for("document.querySelector('.assistant .content').innerText.includes('Paris')")
    assert "right-key" in tab.evaluate("JSON.stringify(sessionStorage)")
    assert "right-key" not in tab.evaluate("JSON.stringify(localStorage)")
    assert "right-key" not in json.dumps([url for url, _ in tab.requested()])
    change_settings(tab)
    tab.click("#open-settings")
    tab.click("#remember-key")
    tab.click("#save-settings")
    assert "right-key" in tab.evaluate("JSON.stringify(localStorage)")


def test_an_error_is_one_line_and_can_be_retried(tab, serve):
    server = serve()
    open_page(tab, server.url)
    change_settings(tab, extra='{"temprature": 1}')
    ask(tab)
    tab.wait_for("document.querySelector('.status .error')")
    assert tab.text(".status .error span") == "temprature is not a known parameter: did you mean temperature?"
    change_settings(tab, extra=" ")
    tab.click(".status .error button")
    tab.wait_for("document.querySelector('.assistant .content').innerText.includes('Paris')")
    assert tab.text(".status .error") == ""
    server.stop()
    ask(tab)
    tab.wait_for("document.querySelector('.status .error')")
    assert "cannot be reached" in tab.text(".status .error span")


def test_an_empty_page_suggests_questions(page):
    assert page.evaluate("!document.getElementById('welcome').hidden")
    page.click("#welcome button:last-child")
    assert page.evaluate("document.getElementById('prompt').value") == page.text("#welcome button:last-child")


def test_a_model_without_sampling_settings_is_asked_with_what_suits_a_chat(page):
    fields = """(async () => {
      const { Settings } = await import("/static/js/settings.js");
      const fields = Object.create(Settings.prototype);
      Object.assign(fields, { inputs: new Map(), values: { parameters: { top_k: 5 }, stop: "", extra: "" } });
      fields.showDefaults({ temperature: 1, top_p: %s, top_k: 0, min_p: 0 });
      return JSON.stringify(fields.requestFields());
    })()"""
    assert json.loads(page.evaluate(fields % "1")) == {"temperature": 0.8, "top_p": 0.95, "top_k": 5}
    assert json.loads(page.evaluate(fields % "0.9")) == {"top_k": 5}
