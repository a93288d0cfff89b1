"""Clients share the tokens of steps, however many prompts each of them has."""

from __future__ import annotations

from collections import Counter

from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.scheduling.fair_shares import FairShares
from tests.engine.scheduling.test_scheduler import add, make_scheduler, run, shape
from tests.support.simulated_engine import SimulatedEngine


def prefilled_by_client(scheduler, num_steps):
    """Prompt tokens that each client is served in each of the next steps."""
    return [
        dict(Counter(entry.sequence.client for entry in run(scheduler).scheduled for _ in range(entry.num_tokens)))
        for _ in range(num_steps)
    ]


def test_a_short_prompt_waits_for_one_chunk_of_another_clients_long_ones():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=8)
    for number in range(6):
        add(scheduler, chr(ord("a") + number), 56, arrival=number, client="many")
    assert shape(run(scheduler)) == [("a", 0, 16, False)]
    add(scheduler, "z", 4, arrival=6, client="one")
    assert shape(run(scheduler)) == [("z", 0, 4, True), ("a", 16, 2, False)]  # z waits for its token
    assert shape(run(scheduler)) == [("z", 4, 1, True), ("a", 18, 3, False)]


def test_a_step_whose_tokens_a_client_waits_for_has_little_of_other_clients_prompts():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=8)
    add(scheduler, "a", 2, client="one")
    run(scheduler)
    add(scheduler, "b", 56, arrival=1, client="many")
    add(scheduler, "c", 56, arrival=2, client="many")
    assert [shape(run(scheduler)) for _ in range(2)] == [
        [("a", 2 + step, 1, True), ("b", 3 * step, 3, False)] for step in range(2)
    ]
    # The prompt of the client that waits fills what is left, once it is its turn.
    add(scheduler, "z", 30, arrival=3, client="one")
    assert shape(run(scheduler)) == [("a", 4, 1, True), ("z", 0, 15, False)]


def test_steps_are_full_where_nobody_else_waits():
    for other in ({"client": "many"}, {"client": "one", "priority": 1}):
        scheduler = make_scheduler(num_blocks=512, max_num_seqs=8)
        add(scheduler, "a", 2, **other)
        run(scheduler)
        add(scheduler, "b", 56, arrival=1, client="many")
        assert shape(run(scheduler)) == [("a", 2, 1, True), ("b", 0, 15, False)]


def test_prompts_go_on_however_many_sequences_of_another_client_decode():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=16)
    for number in range(10):
        add(scheduler, chr(ord("a") + number), 1, arrival=number, client="one")
    run(scheduler)
    add(scheduler, "z", 8, arrival=20, client="many")
    assert [shape(run(scheduler))[-1] for _ in range(2)] == [("z", 0, 2, False), ("z", 2, 2, False)]


def test_without_clients_prompts_are_served_as_they_arrive():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=8)
    add(scheduler, "a", 40, arrival=0)
    assert shape(run(scheduler)) == [("a", 0, 16, False)]
    add(scheduler, "z", 4, arrival=1)
    assert shape(run(scheduler)) == [("a", 16, 16, False)]
    assert shape(run(scheduler)) == [("a", 32, 8, True), ("z", 0, 4, True)]


def test_clients_with_long_prompts_take_turns():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=8)
    for number in range(4):
        add(scheduler, "abcd"[number], 56, arrival=number, client="xxxy"[number], max_tokens=1)
    # The first three steps of both; then y has ended.
    assert prefilled_by_client(scheduler, 6) == [{"x": 16}, {"y": 16}] * 3


def test_a_client_that_was_away_has_no_claim_on_the_past():
    shares = FairShares()
    for _ in range(5):
        shares.serve("busy", 100)
    assert shares.turn("new") == shares.turn("other") == 400 < shares.turn("busy") == 500
    shares.serve("new", 100)
    assert shares.turn("new") == shares.turn("busy")


def test_clients_of_the_past_are_forgotten():
    shares = FairShares()
    for number in range(5000):
        shares.serve(f"client {number}", 1)
        shares.serve("another", 2)
    assert len(shares._next) < 2500
    assert shares.turn("another") == 10_000


def test_better_priority_goes_before_any_turn():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=8)
    add(scheduler, "a", 40, arrival=0, client="x")
    run(scheduler)
    add(scheduler, "b", 40, arrival=1, client="y", priority=1)
    assert prefilled_by_client(scheduler, 2) == [{"x": 16}, {"x": 8, "y": 2}]


def test_a_client_with_all_places_gives_one_back():
    scheduler = make_scheduler(num_blocks=512, max_num_seqs=4, max_num_batched_tokens=64)
    for number in range(4):
        add(scheduler, "abcd"[number], 4, arrival=number, client="x", max_tokens=40)
    run(scheduler)
    short = [add(scheduler, "uvw"[number], 4, arrival=4 + number, client="y", max_tokens=2) for number in range(3)]
    outputs = [run(scheduler, token=8) for _ in range(12)]
    assert [seq_id.request_id for seq_id in outputs[0].preempted] == ["d"]
    assert all(sequence.status.finished for sequence in short)
    # The others of the first client lost nothing meanwhile.
    assert all(
        "".join(entry.sequence.seq_id.request_id for entry in output.scheduled)[:3] == "abc" for output in outputs
    )


def test_a_client_with_all_blocks_gives_some_back():
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(3):
        add(scheduler, "abc"[number], 15, arrival=number, client="x", max_tokens=20)
    run(scheduler)
    add(scheduler, "z", 8, arrival=9, client="y")
    output = run(scheduler)
    assert [seq_id.request_id for seq_id in output.preempted] == ["c"]
    assert ("z", 0, 8, True) in shape(output)


def test_prefills_that_hold_what_the_others_need_go_on_one_by_one():
    # With windows, a prefill takes its blocks chunk by chunk: prefills of several can fill the pool between them.
    num_preemptions = 0
    for num_blocks in range(6, 12):
        engine = SimulatedEngine(
            num_blocks={AttentionSpan(11): num_blocks}, block_size=4, max_num_batched_tokens=4, max_model_len=48
        )
        for client in ("x", "y", "z"):
            engine.add([ord(client)] * 30, client=client, max_tokens=4)
        engine.drain()
        num_preemptions += sum(sequence.num_preemptions for sequence in engine.histories)
    assert num_preemptions
