"""Reasoning efforts as thinking budgets, in the words of each protocol."""

import pytest

from jaxis.cli.serve_options import ServerOptions
from jaxis.errors import ConfigError
from tests.support.scripted_engine import TEMPLATE, ScriptedEngine, asking

CHAT = [{"role": "user", "content": "Hi"}]
NO_EFFORT = "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
assert NO_EFFORT in TEMPLATE
THINKS = TEMPLATE.replace(NO_EFFORT, "<think>")
SWITCHED = TEMPLATE.replace(NO_EFFORT, "{{ '<think>' if thinking else '<think></think>' }}")
BUDGETS = {"none": 0, "low": 512, "high": 8192}

BODIES = {
    "/v1/chat/completions": lambda effort: {"messages": CHAT, "reasoning_effort": effort},
    "/v1/responses": lambda effort: {"input": "Hi", "reasoning": {"effort": effort}},
    "/v1/messages": lambda effort: {"messages": CHAT, "max_tokens": 9, "output_config": {"effort": effort}},
    "/api/chat": lambda effort: {"messages": CHAT, "think": effort, "stream": False},
}
LEFT_OUT = {"/v1/responses": "reasoning.effort", "/v1/messages": "output_config.effort"}


def asked(template, path, body, budgets=BUDGETS, **settings):
    """The answer, its prompt, and the budget that the engine was given."""
    engine = ScriptedEngine(template)
    engine.text = "Hm"
    with asking(engine, effort_budgets=budgets, **settings) as http:
        answer = http.post(path, json={"model": "jaxis-tiny", **body})
    return answer, engine.prompt, None if engine.grammar is None else engine.grammar.num_tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", BODIES)
def test_an_effort_is_a_budget_where_the_template_reads_none(path):
    for effort in ("low", "high"):
        answer, _, budget = asked(THINKS, path, BODIES[path](effort))
        assert (answer.status_code, budget) == (200, BUDGETS[effort])
        assert "X-Jaxis-Ignored" not in answer.headers
    assert asked(THINKS, path, BODIES[path]("high"), reasoning_budget=7)[2] == 7
    # The template's own goes first, and without the option nothing changes.
    answer, prompt, budget = asked(TEMPLATE, path, BODIES[path]("low"))
    assert (answer.status_code, prompt.strip()[-5:], budget) == (200, "<low>", None)
    for budgets, settings in (({}, {}), (BUDGETS, {"reasoning_parser": "none"}), ({"high": 9}, {})):
        answer, _, budget = asked(THINKS, path, BODIES[path]("low"), budgets, **settings)
        assert budget is None
        if path in LEFT_OUT:
            assert (answer.status_code, answer.headers["X-Jaxis-Ignored"]) == (200, LEFT_OUT[path])
        elif path != "/api/chat":
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


def test_none_is_no_thinking_and_another_effort_switches_it_on():
    for path in ("/v1/chat/completions", "/v1/responses"):
        assert asked(THINKS, path, BODIES[path]("none"))[2] == 0
        _, prompt, budget = asked(SWITCHED, path, BODIES[path]("low"))
        assert (prompt.strip()[-7:], budget) == ("<think>", 512)
        _, prompt, budget = asked(SWITCHED, path, BODIES[path]("none"))
        assert (prompt.strip()[-8:], budget) == ("</think>", None)


def test_a_budget_of_its_own_goes_first():
    body = BODIES["/v1/chat/completions"]("low")
    assert asked(THINKS, "/v1/chat/completions", {**body, "thinking_token_budget": 3})[2] == 3
    assert asked(THINKS, "/v1/chat/completions", {**body, "thinking_token_budget": -1})[2] is None
    body = {**BODIES["/v1/messages"]("low"), "max_tokens": 9000}
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert asked(THINKS, "/v1/messages", {**body, "thinking": thinking})[2] == 2048


def test_the_option_names_efforts_with_their_tokens():
    assert ServerOptions(reasoning_effort="low=512, high=8192").effort_budgets() == BUDGETS
    assert ServerOptions(reasoning_effort="none=5").effort_budgets() == {"none": 5}
    assert ServerOptions().effort_budgets() == {}
    for wrong in ("low", "low=", "low=-1", "low=x", "low=512,,high=1", "", "=5", "low=99999999999"):
        with pytest.raises(ConfigError, match="low=512,medium=2048,high=8192"):
            ServerOptions(reasoning_effort=wrong).effort_budgets()
