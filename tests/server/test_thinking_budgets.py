"""Thinking budgets in the words of each protocol, and the server's ceiling."""

from __future__ import annotations

import pytest

from tests.support.scripted_engine import TEMPLATE, ScriptedEngine, asking

CHAT = [{"role": "user", "content": "Hi"}]
THINKS = TEMPLATE.replace("[assistant]", "[assistant]<think>")


def asked(engine, path, body, **settings):
    """The answer; and the budget that the engine was given, as a parameter and as a grammar."""
    engine.text = "Hm"
    with asking(engine, **settings) as http:
        answer = http.post(path, json={"model": "jaxis-tiny", **body})
    budget = None if engine.grammar is None else engine.grammar.num_tokens
    assert engine.params is None or engine.params.thinking_token_budget == budget
    return answer, budget


BODIES = {
    "/v1/chat/completions": lambda n: {"messages": CHAT, "thinking_token_budget": n},
    "/v1/responses": lambda n: {"input": "Hi", "thinking_token_budget": n},
    "/v1/completions": lambda n: {"prompt": "Hi <think>", "thinking_token_budget": n},
    "/inference/v1/generate": lambda n: {"token_ids": [40, 41], "sampling_params": {"thinking_token_budget": n}},
    "/completion": lambda n: {"prompt": "Hi", "reasoning_budget_tokens": n},
    "/api/chat": lambda n: {"messages": CHAT, "options": {"thinking_token_budget": n}, "stream": False},
    "/api/generate": lambda n: {"prompt": "Hi", "options": {"thinking_token_budget": n}, "stream": False},
    "/v1/messages": lambda n: {
        "messages": CHAT,
        "max_tokens": 9000,
        "thinking": {"type": "enabled", "budget_tokens": n},
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", BODIES)
def test_each_protocol_has_a_budget(path):
    budget = 2048
    engine = ScriptedEngine(THINKS)
    answer, given = asked(engine, path, BODIES[path](budget))
    assert (answer.status_code, given) == (200, budget)
    assert "X-Jaxis-Ignored" not in answer.headers
    assert asked(ScriptedEngine(THINKS), path, BODIES[path](budget), reasoning_budget=7)[1] == 7
    assert asked(ScriptedEngine(THINKS), path, BODIES[path](budget), reasoning_budget=4000)[1] == budget


def test_without_a_budget_there_is_none_but_the_ceiling():
    for more in ({}, {"thinking_token_budget": -1}):
        body = {"messages": CHAT, **more}
        assert asked(ScriptedEngine(THINKS), "/v1/chat/completions", body)[1] is None
        assert asked(ScriptedEngine(THINKS), "/v1/chat/completions", body, reasoning_budget=5)[1] == 5


def test_a_soft_budget_stays_below_the_ceiling():
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/completions"):
        body = BODIES[path](20) | {"thinking_budget_grace_period": 8}
        for ceiling, grace in ((None, 8), (100, 8), (23, 3), (20, 0), (7, 0)):
            engine = ScriptedEngine(THINKS)
            _, budget = asked(engine, path, body, reasoning_budget=ceiling)
            assert (budget, engine.grammar.grace) == (min(20, ceiling or 20), grace)
            assert engine.params.thinking_budget_grace_period == grace


def test_what_the_prompt_has_closed_needs_no_budget():
    engine = ScriptedEngine(TEMPLATE.replace("[assistant]", "[assistant]<think></think>"))
    answer, given = asked(engine, "/v1/chat/completions", {"messages": CHAT, "thinking_token_budget": 5})
    assert (answer.status_code, given) == (200, None)


def test_a_model_whose_thinking_is_unknown_refuses_a_budget_but_has_a_ceiling_like_any():
    for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
        answer, _ = asked(ScriptedEngine(TEMPLATE), path, BODIES[path](5), reasoning_parser="none")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] in ("thinking_token_budget", "sampling_params")
        assert "not known how the model marks its thinking" in error["message"]
    engine = ScriptedEngine(TEMPLATE)
    answer, given = asked(engine, "/v1/messages", BODIES["/v1/messages"](2048), reasoning_parser="none")
    assert (answer.status_code, given) == (200, None)
    assert answer.headers["X-Jaxis-Ignored"] == "thinking.budget_tokens"
    engine = ScriptedEngine(TEMPLATE)
    answer, given = asked(
        engine, "/v1/chat/completions", {"messages": CHAT}, reasoning_parser="none", reasoning_budget=5
    )
    assert (answer.status_code, given) == (200, None)


def test_a_grammar_is_inside_of_the_budget():
    engine = ScriptedEngine(THINKS)
    body = {"messages": CHAT, "thinking_token_budget": 5, "response_format": {"type": "json_object"}}
    _, given = asked(engine, "/v1/chat/completions", body)
    assert given == 5
    assert engine.grammar.grammar is not None
