"""LLMEngine's own bookkeeping of requests and their sequences."""

import pytest

from jaxis import SamplingParams
from jaxis.errors import RequestError

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
PAIR = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, n=2)


def run(engine):
    while engine.has_unfinished:
        engine.step()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("other", ["x/0", "x-0", "x#0", "('x', 0)"])
def test_no_id_of_a_request_is_that_of_anothers_sequence(batching_llm, other):
    engine = batching_llm.engine
    [expected_pair] = batching_llm.generate([[1, 2, 3]], PAIR)
    [expected] = batching_llm.generate([[9, 8, 7]], PARAMS)
    pair = engine.add_request("x", [1, 2, 3], PAIR)
    alone = engine.add_request(other, [9, 8, 7], PARAMS)
    run(engine)
    assert pair.output().outputs == expected_pair.outputs
    assert alone.output().outputs == expected.outputs


def test_an_id_in_use_is_refused_until_its_request_has_ended(batching_llm):
    engine = batching_llm.engine
    engine.add_request("x", [1, 2, 3], PAIR)
    with pytest.raises(RequestError, match="request 'x' already exists"):
        engine.add_request("x", [4], PARAMS)
    run(engine)
    again = engine.add_request("x", [4], PARAMS)
    run(engine)
    assert len(again.completions[0].sequence.output_token_ids) == 12


def test_a_request_of_which_one_sequence_is_refused_leaves_none_behind(batching_llm, monkeypatch):
    engine = batching_llm.engine
    add, calls = engine.scheduler.add_sequence, []

    def refuse_the_second(sequence):
        calls.append(sequence)
        if len(calls) == 2:
            raise RequestError("no room")
        add(sequence)

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "add_sequence", refuse_the_second)
        with pytest.raises(RequestError, match="no room"):
            engine.add_request("x", [1, 2, 3], PAIR)
    assert not engine.has_unfinished
    assert not engine.scheduler.has_unfinished
