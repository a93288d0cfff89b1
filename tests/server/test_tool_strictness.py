"""Requests whose calls are held to a grammar where the model decides to call, in each protocol."""

import pytest

from jaxis.engine.grammar.token_mask import is_allowed
from tests.support.scripted_engine import TEMPLATE, ScriptedEngine, asking

SCHEMA = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
CHAT = [{"role": "user", "content": "Hi"}]


def chat(**more):
    function = {"name": "f", "parameters": SCHEMA, **more}
    return {"messages": CHAT, "tools": [{"type": "function", "function": function}]}


BODIES = {
    "/v1/chat/completions": chat,
    "/v1/responses": lambda **more: {
        "input": "Hi",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, **more}],
    },
    "/v1/messages": lambda **more: {
        "messages": CHAT,
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": SCHEMA, **more}],
    },
    "/api/chat": lambda **more: {**chat(**more), "stream": False},
}


def answer(engine, path, body, strictness):
    engine.text = "Hi"
    with asking(engine, tool_strictness=strictness) as http:
        return http.post(path, json={"model": "jaxis-tiny", **body})


def may_follow(engine, text, more):
    """True if an answer that begins with this text may go on with a character."""
    matcher = engine.grammar.new_matcher()
    matcher.follow(engine.tokenizer.encode(text, add_special_tokens=False))
    return is_allowed(matcher.token_mask(), engine.tokenizer.encode(more, add_special_tokens=False)[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", BODIES)
def test_always_holds_every_function_and_request_those_that_say_so(path):
    engine = ScriptedEngine(TEMPLATE + "{# <TOOLCALL> #}")
    assert answer(engine, path, BODIES[path](strict=False), "request").status_code == 200
    assert engine.grammar is None
    strict = [("always", {}), ("always", {"strict": False})]
    if path != "/api/chat":  # Ollama's tools have no such field
        strict.append(("request", {"strict": True}))
    for strictness, more in strict:
        assert answer(engine, path, BODIES[path](**more), strictness).status_code == 200
        call = 'So <b>: <TOOLCALL>[{"name": "f", "arguments": {"n": '
        for end in range(call.index("<TOOLCALL>")):
            assert may_follow(engine, call[:end], "x")
        assert not may_follow(engine, "So <b>: <TOOLCALL>", "x")
        assert may_follow(engine, call, "7")
        assert not may_follow(engine, call, "8")


def test_a_schema_that_cannot_be_ensured_says_which_of_both_to_change():
    body = chat(parameters=SCHEMA | {"patternProperties": {"^a": {}}})
    engine = ScriptedEngine(TEMPLATE + "{# <function= #}")
    assert answer(engine, "/v1/chat/completions", body, "request").status_code == 200
    for strictness, more, advice in (
        ("always", {}, "start without --tool-strictness always"),
        ("request", {"strict": True}, "leave strict out"),
    ):
        body["tools"][0]["function"] |= more
        refused = answer(engine, "/v1/chat/completions", body, strictness)
        assert refused.status_code == 400
        assert advice in refused.json()["error"]["message"]
