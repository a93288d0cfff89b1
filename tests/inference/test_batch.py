"""Rows through an engine: as many as it holds, each failing alone."""

import pytest

from jaxis import SamplingParams
from jaxis.errors import EngineError, RequestError
from jaxis.inference.batch import RowFailure, run_rows
from jaxis.jsonl.source import Row
from jaxis.prompts import TokenizedPrompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def rows(num_rows):
    return (Row(i, {}, str(i)) for i in range(num_rows))


def prompt_of(index):
    return [1 + index % 7, 2, 3 + index]


def prepare(row):
    return TokenizedPrompt(None, prompt_of(row.index)), GREEDY, None


def run_all(engine, num_rows, prepare=prepare):
    return {row.index: outcome for finished in run_rows(engine, rows(num_rows), prepare) for row, outcome in finished}


def failing_steps(monkeypatch, engine, fails):
    """Makes a step raise where `fails(request ids in the engine)`."""
    dispatch = engine.runner.dispatch

    def dispatch_or_fail(output, sampling):
        if fails({entry.sequence.seq_id.request_id for entry in output.scheduled}):
            raise RuntimeError("boom")
        return dispatch(output, sampling)

    monkeypatch.setattr(engine.runner, "dispatch", dispatch_or_fail)


def test_every_row_gets_what_it_gets_alone(batching_llm):
    outputs = run_all(batching_llm.engine, 40)
    for index in (0, 17, 39):
        [alone] = batching_llm.generate([prompt_of(index)], GREEDY, progress=False)
        assert outputs[index].outputs[0].token_ids == alone.outputs[0].token_ids
    assert sorted(outputs) == list(range(40))


def test_no_more_rows_are_taken_than_two_engines_hold(batching_llm):
    taken = 0

    def counted():
        nonlocal taken
        for row in rows(1000):
            taken += 1
            yield row

    steps = run_rows(batching_llm.engine, counted(), prepare)
    num_done = 0
    for finished in steps:
        num_done += len(finished)
        assert taken - num_done <= 2 * 8
        if num_done >= 30:
            break
    steps.close()
    assert not batching_llm.engine.has_unfinished
    assert taken < 60


def test_a_row_that_cannot_be_prepared_or_queued_fails_alone(batching_llm):
    def prepare_some(row):
        if row.index == 1:
            raise RequestError("no such template")
        if row.index == 2:
            raise KeyError("surprise")
        return TokenizedPrompt(None, [] if row.index == 3 else prompt_of(row.index)), GREEDY, None

    outputs = run_all(batching_llm.engine, 5, prepare_some)
    assert outputs[1] == RowFailure("no such template", "RequestError", False)
    assert outputs[2] == RowFailure("KeyError: 'surprise'", "KeyError", False)
    assert "empty" in outputs[3].message
    assert outputs[0].finished
    assert outputs[4].finished


def test_the_row_that_breaks_a_step_fails_and_the_others_do_not(batching_llm, monkeypatch):
    expected = run_all(batching_llm.engine, 12)
    failing_steps(monkeypatch, batching_llm.engine, lambda ids: "row-5" in ids)
    outputs = run_all(batching_llm.engine, 12)
    assert outputs[5].retryable
    assert "boom" in outputs[5].message
    for index in set(range(12)) - {5}:
        assert outputs[index].outputs[0].token_ids == expected[index].outputs[0].token_ids


def test_an_engine_that_always_fails_ends_the_run(batching_llm, monkeypatch):
    failing_steps(monkeypatch, batching_llm.engine, lambda ids: True)
    with pytest.raises(EngineError, match="boom"):
        run_all(batching_llm.engine, 12)
