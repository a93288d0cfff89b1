"""The scheduler's decisions, one by one, in cases small enough to follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.places import NO_PLACES, Places
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.errors import ConfigError, RequestError
from jaxis.prompts import EmbeddedInput
from jaxis.sampling_params import SamplingParams
from tests.support.simulated_engine import EOS_TOKEN_ID, SimulatedEngine, known_tokens


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    places: Places = NO_PLACES,
    is_ready: Callable[[EmbeddedInput], bool] = lambda _: True,
) -> Scheduler:
    return Scheduler(
        BlockManager({FULL_CONTEXT: num_blocks}, block_size, enable_prefix_caching=True),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        places=places,
        is_ready=is_ready,
    )


def add(
    scheduler: Scheduler,
    name: str,
    prompt_length: int,
    *,
    arrival: int = 0,
    priority: int = 0,
    client: str | None = None,
    place: bytes = b"",
    **sampling: object,
) -> Sequence:
    """Queues a sequence whose prompt no other shares."""
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    prompt = [ord(name[0])] * prompt_length
    sequence = Sequence(
        SequenceId(name),
        prompt,
        params,
        frozenset({EOS_TOKEN_ID}),
        prompt_length + params.max_tokens,
        arrival=arrival,
        priority=priority,
        client=client,
        place=place,
    )
    scheduler.add_sequence(sequence)
    return sequence


def shape(output: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [
        (entry.sequence.seq_id.request_id, entry.start, entry.num_tokens, entry.samples) for entry in output.scheduled
    ]


def take_in(scheduler: Scheduler, output: SchedulerOutput, tokens: list[int]) -> list[tuple[Sequence, int]]:
    """Takes in one token for each entry of a step."""
    new_tokens = scheduler.update(output, [[token] for token in tokens])
    return [(sequence, token) for sequence, token, _ in new_tokens]


def run(scheduler: Scheduler, token: int = 9) -> SchedulerOutput:
    """One whole step, in which every sequence samples `token`."""
    output = scheduler.schedule()
    take_in(scheduler, output, [token] * len(output.scheduled))
    return output


class TestBatching:
    def test_prefill_chunks_and_decodes_share_the_token_budget(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        add(scheduler, "a", 6, arrival=0)
        add(scheduler, "b", 20, arrival=1)
        add(scheduler, "c", 2, arrival=2)
        assert shape(run(scheduler)) == [("a", 0, 6, True), ("b", 0, 4, False)]
        assert shape(run(scheduler)) == [("a", 6, 1, True), ("b", 4, 9, False)]
        output = run(scheduler)
        assert shape(output) == [("a", 7, 1, True), ("b", 13, 7, True), ("c", 0, 2, True)]
        assert (output.num_decodes, output.num_tokens) == (1, 10)
        output = run(scheduler)
        assert shape(output) == [("a", 8, 1, True), ("b", 20, 1, True), ("c", 2, 1, True)]
        assert output.num_decodes == 3

    def test_decodes_come_before_prefills_of_earlier_requests(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2)
        add(scheduler, "short", 2, arrival=1)
        run(scheduler)
        add(scheduler, "long", 20, arrival=0)
        output = run(scheduler)
        assert shape(output) == [("short", 2, 1, True), ("long", 0, 7, False)]
        assert output.num_decodes == 1

    def test_no_more_than_max_num_seqs_run(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        for arrival, name in enumerate("abc"):
            add(scheduler, name, 2, arrival=arrival)
        assert len(run(scheduler).scheduled) == 2
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
        scheduler.abort_sequence(SequenceId("a"))
        assert [name for name, *_ in shape(run(scheduler))] == ["b", "c"]

    def test_waiting_requests_are_admitted_by_priority_then_arrival(self) -> None:
        scheduler = make_scheduler(max_num_seqs=1)
        for name, priority, arrival in [("d", 1, 0), ("b", 0, 2), ("a", -1, 3), ("c", 0, 4)]:
            add(scheduler, name, 2, priority=priority, arrival=arrival, max_tokens=1)
        assert [shape(run(scheduler))[0][0] for _ in range(4)] == ["a", "b", "c", "d"]
        assert not scheduler.has_unfinished

    def test_the_head_of_the_queue_is_not_overtaken(self) -> None:
        scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64)
        add(scheduler, "a", 16, arrival=0)
        run(scheduler)
        add(scheduler, "big", 20, arrival=1)
        add(scheduler, "tiny", 1, arrival=2)
        assert shape(run(scheduler)) == [("a", 16, 1, True)]
        scheduler.abort_sequence(SequenceId("a"))
        assert [name for name, *_ in shape(run(scheduler))] == ["big", "tiny"]

    def test_nothing_to_do_is_none(self) -> None:
        scheduler = make_scheduler()
        assert scheduler.schedule() is None
        add(scheduler, "a", 2, max_tokens=1)
        run(scheduler)
        assert scheduler.schedule() is None

    def test_budget_must_let_every_request_decode(self) -> None:
        with pytest.raises(ConfigError, match="max_num_batched_tokens=3 is less than max_num_seqs=4"):
            make_scheduler(max_num_seqs=4, max_num_batched_tokens=3)


class OnePlace(Places):
    """One place at a time, which sequences with its key share."""

    def __init__(self) -> None:
        self.users: list[bytes] = []

    def has_place(self, place: bytes) -> bool:
        return not place or set(self.users) <= {place}

    def take(self, place: bytes) -> None:
        assert self.has_place(place)
        self.users += [place] * bool(place)

    def give_back(self, place: bytes) -> None:
        if place:
            self.users.remove(place)


class TestPlaces:
    def test_what_needs_no_place_passes_what_waits_for_one_and_nothing_else_does(self) -> None:
        scheduler = make_scheduler(places=OnePlace())
        first = add(scheduler, "a", 2, arrival=0, place=b"x", max_tokens=2)
        add(scheduler, "b", 2, arrival=1, place=b"y", max_tokens=2)
        add(scheduler, "c", 2, arrival=2, place=b"x", max_tokens=2)  # would keep the place from b
        add(scheduler, "d", 2, arrival=3, max_tokens=4)
        add(scheduler, "e", 2, arrival=4, max_tokens=4)
        assert shape(run(scheduler)) == [("a", 0, 2, True), ("d", 0, 2, True), ("e", 0, 2, True)]
        assert [name for name, *_ in shape(run(scheduler))] == ["a", "d", "e"]
        assert first.status.finished
        assert [name for name, *_ in shape(run(scheduler))] == ["d", "e", "b"]
        assert [name for name, *_ in shape(run(scheduler))] == ["b", "d", "e"]
        assert [name for name, *_ in shape(run(scheduler))] == ["c"]

    def test_a_preempted_sequence_gives_its_place_back(self) -> None:
        places = OnePlace()
        scheduler = make_scheduler(num_blocks=4, places=places)
        add(scheduler, "a", 8, arrival=0)
        add(scheduler, "b", 4, arrival=1, place=b"x")
        while not run(scheduler).preempted:
            assert places.users == [b"x"]
        assert places.users == []


class TestPrefixCache:
    def test_the_next_step_finds_blocks_of_the_one_in_flight(self) -> None:
        engine = SimulatedEngine(run_ahead=1)
        prompt = list(range(1, 11))
        engine.add(prompt)
        engine.schedule()
        follower = engine.add(prompt)
        assert shape(engine.schedule())[1] == (follower.seq_id.request_id, 8, 2, True)
        assert follower.num_cached_tokens == 8
        engine.drain()

    def test_a_prompt_found_whole_recomputes_its_last_block(self) -> None:
        engine = SimulatedEngine()
        prompt = list(range(1, 9))
        engine.add(prompt)
        engine.drain()
        follower = engine.add(prompt)
        assert shape(engine.schedule()) == [(follower.seq_id.request_id, 4, 4, True)]
        engine.drain()

    def test_generated_tokens_are_found_by_the_next_turn(self) -> None:
        engine = SimulatedEngine()
        first = engine.add(list(range(1, 6)), max_tokens=8)
        engine.drain()
        next_turn = engine.add([*known_tokens(first), 3])
        engine.drain()
        # 13 tokens, the last of them sampled and never computed: 12 stand in the cache.
        assert next_turn.num_cached_tokens == 12


class TestStopping:
    @pytest.mark.parametrize(
        ("sampling", "tokens", "expected", "reason", "stop_reason"),
        [
            ({"max_tokens": 3}, [5, 6, 7], [5, 6, 7], "length", None),
            ({}, [5, EOS_TOKEN_ID], [5, 0], "stop", None),
            ({"ignore_eos": True, "max_tokens": 3}, [0, 0, 0], [0, 0, 0], "length", None),
            ({"stop_token_ids": [6]}, [5, 6], [5, 6], "stop", 6),
            ({"stop_token_ids": [0]}, [5, 0], [5, 0], "stop", None),
            ({"stop_token_ids": [0], "ignore_eos": True}, [5, 0], [5, 0], "stop", 0),
            ({"min_tokens": 2, "stop_token_ids": [6]}, [6, 0, 6], [6, 0, 6], "stop", 6),
            ({"max_tokens": 2}, [5, 0], [5, 0], "stop", None),
        ],
    )
    def test_a_request_ends_as_its_parameters_say(
        self, sampling: dict, tokens: list[int], expected: list[int], reason: str, stop_reason: int | None
    ) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5, **sampling)
        for token in tokens:
            assert not sequence.status.finished
            run(scheduler, token)
        assert sequence.output_token_ids == expected
        assert sequence.status.finish_reason == reason
        assert sequence.stop_reason == stop_reason
        assert not scheduler.has_unfinished
        assert scheduler.block_manager.num_free_blocks == 64

    def test_a_stop_text_ends_a_request_from_outside(self) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5)
        run(scheduler)
        assert scheduler.finish_sequence(SequenceId("a"), SequenceStatus.FINISHED_STOPPED, "END") is sequence
        assert (sequence.status.finish_reason, sequence.stop_reason) == ("stop", "END")
        assert scheduler.finish_sequence(SequenceId("a"), SequenceStatus.FINISHED_STOPPED, "END") is None
        assert scheduler.block_manager.num_free_blocks == 64

    def test_only_a_finished_status_finishes(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 5)
        with pytest.raises(ValueError, match="PREEMPTED does not finish"):
            scheduler.finish_sequence(SequenceId("a"), SequenceStatus.PREEMPTED)

    def test_abort_of_a_waiting_and_of_an_unknown_request(self) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5)
        assert scheduler.abort_sequence(SequenceId("a")) is sequence
        assert sequence.status.finish_reason == "abort"
        assert scheduler.abort_sequence(SequenceId("a")) is None
        assert (scheduler.num_waiting, scheduler.schedule()) == (0, None)


class TestRunAhead:
    def test_a_decode_is_scheduled_before_its_token_is_known(self) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5)
        first = scheduler.schedule()
        second = scheduler.schedule()
        assert shape(second) == [("a", 5, 1, True)]
        assert second.num_decodes == 1
        assert (sequence.num_tokens, sequence.num_tokens_with_inflight) == (5, 7)
        assert take_in(scheduler, first, [11]) == [(sequence, 11)]
        assert take_in(scheduler, second, [12]) == [(sequence, 12)]
        assert known_tokens(sequence)[5:] == [11, 12]

    def test_a_request_is_not_scheduled_past_its_length(self) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5, max_tokens=2)
        outputs = [scheduler.schedule(), scheduler.schedule()]
        assert scheduler.schedule() is None
        for output in outputs:
            take_in(scheduler, output, [9])
        assert sequence.status is SequenceStatus.FINISHED_LENGTH
        assert sequence.num_inflight_tokens == 0

    def test_tokens_after_the_end_are_dropped_even_if_the_id_is_in_use_again(self) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5)
        first, second = scheduler.schedule(), scheduler.schedule()
        take_in(scheduler, first, [EOS_TOKEN_ID])
        assert sequence.status is SequenceStatus.FINISHED_STOPPED
        successor = add(scheduler, "a", 5, arrival=1)
        third = scheduler.schedule()
        assert take_in(scheduler, second, [EOS_TOKEN_ID]) == []
        assert sequence.output_token_ids == [EOS_TOKEN_ID]
        assert successor.output_token_ids == []
        assert take_in(scheduler, third, [4]) == [(successor, 4)]

    def test_tokens_of_an_aborted_request_are_dropped(self) -> None:
        scheduler = make_scheduler()
        sequence = add(scheduler, "a", 5)
        output = scheduler.schedule()
        scheduler.abort_sequence(SequenceId("a"))
        assert take_in(scheduler, output, [9]) == []
        assert sequence.output_token_ids == []
        assert sequence.num_inflight_tokens == 0

    def test_every_entry_needs_a_token(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 5)
        output = scheduler.schedule()
        with pytest.raises(ValueError, match="shorter"):
            take_in(scheduler, output, [])


class TestPreemption:
    def make_full(self, first_priority: int = 0) -> tuple[Scheduler, Sequence, Sequence]:
        """Two sequences that hold all four blocks, full to the last slot with the tokens in flight."""
        scheduler = make_scheduler(num_blocks=4)
        first = add(scheduler, "a", 7, arrival=0, priority=first_priority)
        second = add(scheduler, "b", 7, arrival=1)
        run(scheduler)
        return scheduler, first, second

    def test_the_request_served_last_gives_way_and_keeps_its_token_in_flight(self) -> None:
        scheduler, first, second = self.make_full()
        in_flight = scheduler.schedule()
        output = scheduler.schedule()
        assert shape(output) == [("a", 8, 1, True)]
        assert output.preempted == (SequenceId("b"),)
        assert second.status is SequenceStatus.PREEMPTED
        assert (second.block_tables, second.num_computed_tokens, second.num_preemptions) == ([], 0, 1)
        assert take_in(scheduler, in_flight, [20, 21]) == [(first, 20), (second, 21)]
        assert second.output_token_ids == [9, 21]
        assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)

    def test_a_request_that_needs_a_block_may_be_its_own_victim(self) -> None:
        scheduler, first, second = self.make_full(first_priority=1)
        run(scheduler)
        output = run(scheduler)
        assert shape(output) == [("b", 8, 1, True)]
        assert output.preempted == (SequenceId("a"),)
        assert (first.num_preemptions, second.num_preemptions) == (1, 0)

    def test_a_preempted_request_may_end_while_it_waits(self) -> None:
        scheduler, _, second = self.make_full()
        in_flight = scheduler.schedule()
        scheduler.schedule()
        take_in(scheduler, in_flight, [20, EOS_TOKEN_ID])
        assert second.status is SequenceStatus.FINISHED_STOPPED
        assert scheduler.num_waiting == 0

    def test_a_preempted_request_goes_before_later_ones_and_recomputes_prompt_and_output(self) -> None:
        scheduler, _, second = self.make_full()
        run(scheduler)
        run(scheduler)
        add(scheduler, "c", 1, arrival=2)
        assert [name for name, *_ in shape(run(scheduler))] == ["a"]
        scheduler.abort_sequence(SequenceId("a"))
        output = run(scheduler)
        # One block of b survived in the prefix cache, the other was taken by a.
        assert shape(output) == [("b", 4, 5, True), ("c", 0, 1, True)]
        assert output.num_decodes == 0
        assert second.num_cached_tokens == 0

    def test_a_preemption_in_a_step_that_ran_nothing_is_reported_by_the_next(self) -> None:
        scheduler = make_scheduler(num_blocks=4)
        add(scheduler, "a", 7, arrival=0, max_tokens=2)
        add(scheduler, "b", 7, arrival=1)
        outputs = [scheduler.schedule(), scheduler.schedule()]
        assert scheduler.schedule() is None  # a waits for its last token, b for a's blocks
        for output in outputs:
            take_in(scheduler, output, [9, 9])
        output = scheduler.schedule()
        assert output.preempted == (SequenceId("b"),)
        assert [name for name, *_ in shape(output)] == ["b"]
        assert scheduler.schedule().preempted == ()

    @pytest.mark.parametrize("run_ahead", [0, 1])
    def test_requests_that_fit_only_one_at_a_time_all_finish(self, run_ahead: int) -> None:
        engine = SimulatedEngine(num_blocks=5, block_size=4, run_ahead=run_ahead)
        for token in range(1, 6):
            engine.add([token] * 5, max_tokens=15)
        engine.drain(max_steps=500)


class TestRefusal:
    @pytest.mark.parametrize(
        ("prompt_length", "max_tokens", "message"),
        [
            (0, 8, "the prompt is empty"),
            (60, 8, "may grow to 68 tokens, more than max_model_len=64"),
            (30, 8, "may need 10 KV cache blocks of 4 tokens, and there are 8"),
        ],
    )
    def test_what_could_never_run_is_refused_with_its_sizes(
        self, prompt_length: int, max_tokens: int, message: str
    ) -> None:
        scheduler = make_scheduler(num_blocks=8)
        with pytest.raises(RequestError, match=message):
            add(scheduler, "a", prompt_length, max_tokens=max_tokens)
        assert not scheduler.has_unfinished

    def test_a_prompt_that_leaves_no_room_is_refused(self) -> None:
        scheduler = make_scheduler(max_model_len=8)
        sequence = Sequence(SequenceId("a"), [1] * 8, SamplingParams(), frozenset(), 8, arrival=0)
        with pytest.raises(RequestError, match="has 8 tokens, which leaves none to generate of at most 8"):
            scheduler.add_sequence(sequence)

    def test_an_id_in_use_is_refused(self) -> None:
        scheduler = make_scheduler()
        add(scheduler, "a", 5)
        with pytest.raises(RequestError, match="'a' already exists"):
            add(scheduler, "a", 5)

    def test_a_request_that_just_fits_runs_to_its_end(self) -> None:
        engine = SimulatedEngine(num_blocks=8, block_size=4)
        sequence = engine.add([1] * 25, max_tokens=8)  # 33 tokens, the last of them never computed
        engine.drain()
        assert len(sequence.output_token_ids) == 8


class TestLocalLayers:
    """Beside layers with full context, layers with a window of 9; blocks of 4 tokens."""

    WINDOW = AttentionSpan(9)

    def test_a_prefill_waits_for_blocks_of_a_window_and_no_sequence_is_admitted_before_it(self) -> None:
        num_blocks = {FULL_CONTEXT: 64, self.WINDOW: 19}
        engine = SimulatedEngine(num_blocks=num_blocks, block_size=4, max_num_seqs=8, max_num_batched_tokens=12)
        decodes = [engine.add([token] * 6, max_tokens=20 + token) for token in range(1, 6)]
        while engine.scheduler.num_waiting:
            engine.step()
        long, late = engine.add([6] * 40, max_tokens=2), engine.add([7], max_tokens=2)
        num_waits = 0
        while long.num_computed_tokens < 40:
            output = engine.step()
            scheduled = {entry.sequence for entry in output.scheduled}
            assert scheduled >= {sequence for sequence in decodes if not sequence.status.finished}
            num_waits += long.num_computed_tokens > 0 and long not in scheduled
            assert late not in scheduled or long.num_computed_tokens == 40
        assert num_waits > 0
        assert sum(sequence.num_preemptions for sequence in engine.histories) == 0
        engine.drain()

    def test_a_prompt_longer_than_a_windows_pool_runs(self) -> None:
        # A window holds at most 2 + 2 blocks and those of a step's 8 tokens.
        engine = SimulatedEngine(num_blocks={FULL_CONTEXT: 16, self.WINDOW: 6}, max_num_batched_tokens=8)
        sequence = engine.add([1] * 50, max_tokens=14)
        engine.drain()
        assert len(sequence.output_token_ids) == 14
        with pytest.raises(RequestError, match="may need 6 KV cache blocks of 4 tokens, and there are 5"):
            SimulatedEngine(num_blocks={FULL_CONTEXT: 16, self.WINDOW: 5}, max_num_batched_tokens=8).add([1] * 50)

    @pytest.mark.parametrize("run_ahead", [0, 1])
    def test_requests_that_fit_a_windows_pool_only_one_at_a_time_all_finish(self, run_ahead: int) -> None:
        num_blocks = {FULL_CONTEXT: 64, self.WINDOW: 6}
        engine = SimulatedEngine(num_blocks=num_blocks, max_num_batched_tokens=8, run_ahead=run_ahead)
        for token in range(1, 6):
            engine.add([token] * 30, max_tokens=15)
        engine.drain(max_steps=500)

    def test_the_next_turn_continues_where_the_last_one_ended(self) -> None:
        engine = SimulatedEngine(num_blocks={FULL_CONTEXT: 32, self.WINDOW: 12})
        first = engine.add(list(range(1, 21)), max_tokens=8)
        engine.drain()
        next_turn = engine.add([*known_tokens(first), 3])
        engine.drain()
        assert next_turn.num_cached_tokens == 24


class TestInputs:
    def test_what_sees_each_other_is_computed_in_one_step(self) -> None:
        """Two such inputs of 10 tokens, at positions 3 and 15, in steps of 16 tokens, beside a decode and alone."""
        scheduler = make_scheduler(max_num_batched_tokens=16)
        add(scheduler, "a", 2, arrival=0, max_tokens=4)
        run(scheduler)
        sequence = add(scheduler, "b", 30, arrival=1)
        parts = [EmbeddedInput(b"", start, 10, tuple(range(10)), (), b"", is_bidirectional=True) for start in (3, 15)]
        sequence.spans = tuple(parts)
        assert shape(run(scheduler)) == [("a", 2, 1, True), ("b", 0, 15, False)]
        assert shape(run(scheduler)) == [("a", 3, 1, True), ("b", 15, 15, True)]

    def test_others_go_on_while_an_input_is_encoded(self) -> None:
        """Its sequence is computed up to the input, and beyond it once it is ready; alone, it waits for no other."""
        ready: set[int] = set()
        scheduler = make_scheduler(max_num_batched_tokens=16, is_ready=lambda item: item.start in ready)
        add(scheduler, "a", 2, arrival=0, max_tokens=5)
        run(scheduler)
        second = add(scheduler, "b", 12, arrival=1)
        second.spans = (EmbeddedInput(b"", 3, 5, tuple(range(5)), (), b""),)
        assert shape(run(scheduler)) == [("a", 2, 1, True), ("b", 0, 3, False)]
        assert shape(run(scheduler)) == [("a", 3, 1, True)]
        assert scheduler.awaited_spans == [*second.spans]
        ready.add(3)
        assert shape(run(scheduler)) == [("a", 4, 1, True), ("b", 3, 9, True)]
        assert scheduler.awaited_spans == []
        alone = make_scheduler(max_num_batched_tokens=16, is_ready=lambda _: False)
        add(alone, "c", 12, arrival=0).spans = second.spans
        assert shape(run(alone)) == [("c", 0, 12, True)]

    def test_an_input_waits_for_a_step_with_room_for_it(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        add(scheduler, "a", 6, arrival=0, max_tokens=1)
        second = add(scheduler, "b", 12, arrival=1)
        second.spans = (EmbeddedInput(b"", 0, 9, tuple(range(9)), (), b"", is_bidirectional=True),)
        assert shape(run(scheduler)) == [("a", 0, 6, True)]
        assert shape(run(scheduler)) == [("b", 0, 10, False)]
