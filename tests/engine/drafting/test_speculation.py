"""Which sequences get drafts, and when: those whose guesses come true, if enough of them do beside the others."""

from __future__ import annotations

from types import SimpleNamespace

from jaxis.engine.drafting.chooser import MIN_TIMES, DraftChooser
from jaxis.engine.drafting.speculation import Drafter, Speculation
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.sampling_params import SamplingParams

ANY_DRAFT = SimpleNamespace(allowed_drafts=lambda token_ids: list(token_ids))


class KnownText(Drafter):
    """Guesses that sequence "i" goes on with i, i, i, ...; for those of `silent`, has no guess."""

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.num_asked = 0

    def propose(self, requests):
        self.num_asked += len(requests)
        numbers = [int(request.sequence.seq_id.request_id) for request in requests]
        limits = [request.limit for request in requests]
        return [[] if n in self.silent else [n] * limit for n, limit in zip(numbers, limits, strict=True)]


class Batch:
    """Sequences that decode together, in steps of 16 rows, 32, 48, ..., that take 1 + (rows - 1) / 20.

    Steps without drafts were measured.
    """

    def __init__(self, size: int, *, is_compiled: bool = True) -> None:
        chooser = DraftChooser(lambda num_tokens: -(-num_tokens // 16) * 16, lambda *_: is_compiled, 512)
        self.drafter = KnownText()
        self.speculation = Speculation(self.drafter, chooser, max_drafts=7)
        self.sequences = [
            Sequence(SequenceId(str(i)), [0], SamplingParams(), frozenset(), 1000, arrival=0) for i in range(size)
        ]
        for sequence in self.sequences:
            sequence.status = SequenceStatus.RUNNING
        for _ in range(1 + MIN_TIMES):
            chooser.record(size, size, 0, size, 1.0)

    def step(self, *tokens: list[int], num_wrong: int = 0, seconds: float | None = None) -> None:
        """A step that computed drafts, or none, and gave these tokens; to one sequence after the other.

        Args:
          tokens: Of each sequence.
          num_wrong: Drafts of each that were wrong.
          seconds: How long it took, if that is to be known.
        """
        entries = []
        for sequence, token_ids in zip(self.sequences, tokens, strict=True):
            drafts = (int(sequence.seq_id.request_id),) * (len(token_ids) - 1 + num_wrong)
            start = sequence.num_tokens - 1
            entries.append(ScheduledSequence(sequence, start, 1 + len(drafts), True, None, drafts))
            sequence.output_token_ids += token_ids
            sequence.num_computed_tokens = sequence.num_tokens - 1
        num_decodes = sum(not entry.draft_token_ids for entry in entries)
        self.output = SchedulerOutput(tuple(entries), num_decodes, (), None)
        self.speculation.observe(self.output, tokens)
        if seconds is not None:
            self.speculation.observe_time(self.output, seconds)

    @property
    def wanted(self) -> bool:
        return self.speculation.wants_newest_tokens(self.output, len(self.sequences))

    @property
    def drafts(self) -> dict[str, int]:
        """The number of drafts of each sequence that gets some."""
        sampling = {sequence.seq_id: ANY_DRAFT for sequence in self.sequences}
        proposed = self.speculation.propose(sampling, len(self.sequences))
        return {seq_id.request_id: len(token_ids) for seq_id, token_ids in proposed.items()}


def test_a_guess_must_have_come_true_first() -> None:
    batch = Batch(1)
    batch.step([9])
    assert not batch.wanted
    assert batch.drafts == {}
    batch.step([0])
    assert batch.wanted
    assert batch.drafts == {"0": 7}
    batch.step([9])
    assert not batch.wanted, "the guess was wrong"


def test_few_of_many_sequences_wait_until_enough_have_guesses() -> None:
    batch = Batch(16)
    batch.step(*[[99]] * 16)
    batch.step([0], *[[99]] * 15)
    assert not batch.wanted, "15 others would wait for one"
    batch.step(*[[i] for i in range(16)])
    assert batch.wanted, "and each request was in a step meanwhile"
    drafts = batch.drafts
    assert sum(drafts.values()) == 16, "as many rows as a step is padded to"
    assert drafts["0"] == max(drafts.values()) > 1, "more for the one whose guesses came true more often"
    assert len(drafts) > 8


def test_what_is_not_compiled_delays_no_step() -> None:
    batch = Batch(1, is_compiled=False)
    batch.step([9])
    batch.step([0])
    assert not batch.wanted
    assert batch.drafts == {}


def test_where_there_is_no_guess_no_step_waits() -> None:
    batch = Batch(1)
    batch.step([9])
    batch.step([0])
    batch.drafter.silent = {0}
    batch.step([0])
    assert not batch.wanted
    batch.drafter.silent = set()
    batch.step([0])
    assert batch.wanted, "the last guess had come true"


def test_sequences_that_want_none_get_none() -> None:
    batch = Batch(1)
    batch.sequences[0].sampling_params = SamplingParams(num_speculative_tokens=0)
    for _ in range(3):
        batch.step([0])
        assert not batch.wanted
        assert batch.drafts == {}


def test_while_guesses_have_cost_too_much_none_is_looked_for() -> None:
    batch = Batch(1)
    batch.step([9])
    batch.speculation.chooser.pay(100.0)
    num_asked = batch.drafter.num_asked
    while batch.speculation.chooser.is_overdrawn:
        batch.step([9], seconds=1.0)
        assert not batch.wanted
    assert batch.drafter.num_asked == num_asked
    batch.speculation.chooser.record(1, 1, 0, 1, 1.0)
    batch.step([0])
    assert not batch.wanted, "a guess that was made before is no guess at the newest token"
    batch.step([0])
    assert batch.wanted


def test_while_a_prompt_is_read_no_step_waits() -> None:
    batch = Batch(1)
    batch.step([9])
    batch.step([0])
    assert batch.wanted
    batch.output = SchedulerOutput((*batch.output.scheduled, batch.output.scheduled[0]._replace(samples=False)), 1, ())
    assert not batch.wanted


def test_drafts_that_cost_more_than_they_gain_stop_for_a_while() -> None:
    batch = Batch(16)
    others, right = [[99]] * 16, [[i] for i in range(16)]
    for tokens in (others, right):
        batch.step(*tokens, seconds=1.0)
    assert batch.wanted
    assert sum(batch.drafts.values()) >= 16
    num_failures = 0
    while not batch.speculation.chooser.is_overdrawn:
        batch.step(*others, num_wrong=1, seconds=1.5)
        num_failures += 1
    assert 20 <= num_failures <= 26, "each gave in 1.5 seconds what takes 1, and 12 were saved up"
    num_steps = 0
    while batch.speculation.chooser.is_overdrawn:
        assert not batch.wanted
        assert batch.drafts == {}
        batch.step(*right, seconds=1.0)
        num_steps += 1
    assert num_steps < 200
    for _ in range(6):
        batch.step(*right, seconds=1.0)
    assert batch.wanted, "and goes on where guesses are right"
    for _ in range(10):
        batch.step(*[[i, i] for i in range(16)], seconds=1.5)
    batch.step(*others, num_wrong=1, seconds=1.5)
    assert not batch.speculation.chooser.is_overdrawn, "what was gained may be lost"


def test_a_sequence_that_has_ended_is_forgotten_and_another_one_of_its_name_is_not() -> None:
    batch = Batch(1)
    [ended] = batch.sequences
    batch.step([9])
    ended.status = SequenceStatus.FINISHED_ABORTED
    batch.speculation.forget(ended)
    batch.sequences = [Sequence(SequenceId("0"), [0], SamplingParams(), frozenset(), 1000, arrival=1)]
    batch.sequences[0].status = SequenceStatus.RUNNING
    batch.step([9])
    batch.step([0])
    assert batch.wanted
    batch.speculation.forget(ended)  # with its last step, which was in flight
    assert batch.wanted
