"""Responses that the server keeps, through the `openai` client, on an engine with a script."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat

import openai
import pytest

from jaxis.server.openai.stored.database import FILE, Database, Page
from tests.support.scripted_engine import ScriptedEngine, connected

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<think>hm</think><tool_call>{"name": "weather", "arguments": {}}</tool_call>'


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def client(engine):
    with connected(engine) as client:
        yield client


def ask(client, text="Hi", **more):
    return client.responses.create(model="jaxis-tiny", input=text, **more)


def whole(events):
    """The answer of a stream."""
    return next(event for event in events if event.type == "response.completed").response


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_another_as_if_the_client_had_sent_all_of_it(engine, client, stream):
    engine.answers = [CALL, "Sunny.", "Bye.", "Bye."]
    first = ask(client, tools=[WEATHER], instructions="Be brief.", stream=stream)
    first = whole(first) if stream else first
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = ask(client, [output], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    ask(client, "Thanks", previous_response_id=second.id)
    prompt = engine.prompt
    assert "Be brief." not in prompt, "instructions are a request's own"
    said = [
        {"role": "user", "content": "Hi"},
        *first.output,
        output,
        *second.output,
        {"role": "user", "content": "Thanks"},
    ]
    ask(client, [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in said])
    assert engine.prompt == prompt


def test_what_is_stored_comes_back_and_is_gone_when_it_is_deleted(engine, client):
    engine.text = "Hello."
    response = ask(client, metadata={"a": "b"})
    assert client.responses.retrieve(response.id) == response
    assert response.store is True
    items = client.responses.input_items.list(response.id)
    assert [(item.role, item.content[0].text) for item in items] == [("user", "Hi")]
    later = ask(client, previous_response_id=response.id)
    client.responses.delete(response.id)
    for lost in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.input_items.list(response.id),
        lambda: ask(client, previous_response_id=response.id),
        lambda: ask(client, previous_response_id=later.id),  # what it goes on from is gone
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            lost()
    assert client.responses.retrieve(later.id).id == later.id
    unstored = ask(client, store=False)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_nothing_is_seen_with_another_key(engine, tmp_path):
    with connected(engine, api_keys=("one", "two")) as client:
        mine, other = client.with_options(api_key="one"), client.with_options(api_key="two")
        response = ask(mine)
        for lost in (
            lambda: other.responses.retrieve(response.id),
            lambda: other.responses.delete(response.id),
            lambda: ask(other, previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                lost()
        assert mine.responses.retrieve(response.id) == response


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"conversation": "conv-1"}, "conversation"),
        ({"previous_response_id": "x" * 200}, "previous_response_id"),
    ],
)
def test_what_cannot_be_gone_on_from_is_named(client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.body["param"] == param


def test_a_server_that_stores_nothing_says_so(engine):
    with connected(engine, response_ttl_seconds=0) as client:
        assert ask(client).store is False
        for refused in (
            lambda: ask(client, previous_response_id="resp-1"),
            lambda: client.responses.retrieve("resp-1"),
        ):
            with pytest.raises(openai.BadRequestError, match="--response-ttl"):
                refused()


def test_a_restarted_server_goes_on_from_a_file_that_only_its_owner_can_read(engine, tmp_path):
    folder = tmp_path / "kv"
    engine.text = "Hello."
    with connected(engine, response_folder=folder) as client:
        response = ask(client)
    with connected(engine, response_folder=folder) as client:
        assert client.responses.retrieve(response.id) == response
        ask(client, "More", previous_response_id=response.id)
        assert engine.prompt == "[user]Hi[assistant]Hello.[user]More[assistant]"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    # A damaged file is put aside.
    (folder / FILE).write_bytes(os.urandom(5000))
    with connected(engine, response_folder=folder) as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        assert client.responses.retrieve(ask(client).id)
    assert len(list(folder.glob("*.damaged-*"))) == 1


def test_a_full_disk_loses_what_is_stored_but_no_answer(engine, monkeypatch):
    def full(*_, **__):
        raise sqlite3.OperationalError("database or disk is full")

    engine.text = "Hello."
    for name in ("put", "chain"):
        monkeypatch.setattr(Database, name, full)
    with connected(engine) as client:
        response = ask(client)
        assert response.output_text == "Hello."
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.InternalServerError, match="disk is full"):
            ask(client, previous_response_id=response.id)


def read_file(folder, query):
    """The first row of a query of the file itself."""
    with contextlib.closing(sqlite3.connect(folder / FILE)) as connection:
        return connection.execute(query).fetchone()


class TestDatabase:
    def test_objects_expire_after_their_last_use(self, tmp_path):
        now = 1000.0
        database = Database(tmp_path, 1 << 20, 100, clock=lambda: now)
        database.put("a", "one", {"output": []}, [])
        database.put("a", "two", {"output": []}, [], "one")
        database.put("a", "three", {"output": []}, [])
        now += 99
        assert database.chain("a", "two")
        now += 99
        assert database.get("a", "three") is None
        assert len(database.chain("a", "two")) == 2, "those before it were used too"
        now += 101
        assert database.chain("a", "two") is None
        database.put("a", "four", {"output": []}, [])
        assert read_file(tmp_path, "SELECT count(*) FROM held") == (1,)

    def test_holds_no_more_bytes_than_it_may_and_forgets_what_was_used_least_recently(self, tmp_path):
        now = 1000.0
        database = Database(tmp_path, 10_000, 1e9, clock=lambda: now)
        for number in range(100):
            now += 1
            database.put(
                "a",
                str(number),
                {"output": [{"id": f"o{number}", "text": "x" * 500}]},
                [{"id": "i", "text": "y" * 300}],
            )
            assert database.get("a", "0"), "it is in use"
            [held], [items] = (
                read_file(tmp_path, f"SELECT sum(length(body)) FROM {name}") for name in ("held", "item")
            )
            assert held + items <= 10_000
        assert database.get("a", "99")
        assert database.get("a", "50") is None

    def test_two_servers_may_share_a_file(self, tmp_path):
        one, two = Database(tmp_path, 1 << 20, 100), Database(tmp_path, 1 << 20, 100)
        for number in range(20):
            (one, two)[number % 2].put("a", str(number), {"output": []}, [])
        for database in (one, two):
            assert all(database.get("a", str(number)) for number in range(20))
        one.close()
        two.close()

    def test_pages_end_where_the_items_do(self):
        database = Database(None, 1 << 20, 100)
        database.put("a", "r", {"output": []}, [{"id": str(number)} for number in range(5)])
        ids = lambda page: [item["id"] for item in page[0]]  # noqa: E731
        page = database.page("a", "r", Page("1", 2, descending=False))
        assert (ids(page), page[1]) == (["2", "3"], True)
        page = database.page("a", "r", Page("3", 2, descending=False))
        assert (ids(page), page[1]) == (["4"], False)
        assert ids(database.page("a", "r", Page())) == ["4", "3", "2", "1", "0"]
        assert database.page("a", "r", Page("9")) is None


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {}])
def test_an_item_reference_stands_for_what_is_stored(engine, client, kind):
    engine.answers = ["I look." + CALL, "Sunny.", "Bye.", "Bye."]
    first = ask(client, tools=[WEATHER])
    [asked] = client.responses.input_items.list(first.id)
    references = [{**kind, "id": item.id} for item in (asked, *first.output)]
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    thanks = {"role": "user", "content": "Thanks"}
    second = ask(client, [*references, output, thanks])
    prompt = engine.prompt
    ask(client, [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in first.output), output, thanks])
    assert engine.prompt == prompt
    # What was referred to is an item of the second response, too.
    client.responses.delete(first.id)
    assert len(list(client.responses.input_items.list(second.id))) == len(references) + 2
    ask(client, [*references[:1], {"role": "user", "content": "Again"}])
    assert engine.prompt == "[user]Hi[user]Again[assistant]"


def test_an_item_that_is_gone_or_not_stored_is_named(engine, client):
    engine.text = "Hello."
    first = ask(client)
    reference = {"type": "item_reference", "id": first.output[0].id}
    client.responses.delete(first.id)
    unstored = {"type": "item_reference", "id": ask(client, store=False).output[0].id}
    for item in (reference, unstored, {"id": "msg-other"}):
        with pytest.raises(openai.NotFoundError, match=rf"there is no item '{item['id']}'") as caught:
            ask(client, [item, {"role": "user", "content": "More"}])
        assert caught.value.param == "input"
    without = connected(engine, response_ttl_seconds=0)
    with without as client, pytest.raises(openai.BadRequestError, match="nothing is stored here"):
        ask(client, [reference])


def test_items_are_their_owners_alone(engine):
    with connected(engine, api_keys=("one", "two")) as client:
        mine, other = client.with_options(api_key="one"), client.with_options(api_key="two")
        engine.text = "Secret."
        reference = {"type": "item_reference", "id": ask(mine).output[0].id}
        with pytest.raises(openai.NotFoundError):
            ask(other, [reference])
        assert ask(mine, [reference, {"role": "user", "content": "More"}]).status == "completed"
