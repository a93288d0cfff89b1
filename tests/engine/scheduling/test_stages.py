"""Steps for pipeline stages: several in flight, each with sequences whose tokens are all known."""

from __future__ import annotations

import pytest

from tests.support.simulated_engine import SimulatedEngine


def names(output):
    return None if output is None else [entry.sequence.seq_id.request_id[-1] for entry in output.scheduled]


def start(num_sequences, num_stages, **sizes):
    """An engine whose sequences have been prefilled, with nothing in flight."""
    engine = SimulatedEngine(num_stages=num_stages, max_num_seqs=8, **sizes)
    for number in range(num_sequences):
        engine.add([number + 5], max_tokens=8)
    engine.schedule()
    engine.update()
    return engine


@pytest.mark.parametrize(
    ("num_sequences", "num_stages", "steps"),
    [
        (4, 2, ["01", "23"]),
        (3, 2, ["01", "2"]),
        (5, 4, ["01", "23", "4"]),
        (1, 2, ["0"]),
    ],
)
def test_steps_in_flight_divide_the_decodes(num_sequences, num_stages, steps):
    engine = start(num_sequences, num_stages)
    for _ in range(3):
        assert [names(engine.schedule()) for _ in steps] == [list(step) for step in steps]
        assert engine.schedule() is None, "all sequences have a token in flight"
        for _ in steps:
            engine.update()
    engine.drain()


def test_a_step_follows_as_soon_as_the_oldest_is_known():
    engine = start(4, 2)
    assert names(engine.schedule()) == ["0", "1"]
    assert names(engine.schedule()) == ["2", "3"]
    engine.update()
    assert names(engine.schedule()) == ["0", "1"]
    engine.update()
    assert names(engine.schedule()) == ["2", "3"]
    engine.drain()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages():
    engine = SimulatedEngine(num_stages=3, max_num_batched_tokens=16)
    engine.add(list(range(5, 50)), max_tokens=3)
    assert [engine.schedule().num_tokens for _ in range(3)] == [16, 16, 13]
    assert engine.schedule() is None, "its first token is in flight"
    engine.drain()


def test_an_ended_sequence_leaves_a_step_in_flight_that_is_taken_in():
    engine = start(4, 2)
    engine.schedule()
    engine.schedule()
    engine.finish(engine.unfinished[0])
    engine.update()
    assert names(engine.schedule()) == ["1"]
    engine.drain()
