"""Data ranks whose devices are dictionaries: a `SimulatedEngine` checks each rank, and this what they do together."""

from __future__ import annotations

from collections import deque
from itertools import groupby

from jaxis.engine.scheduling.data_ranks import DataRanksOutput, DataRanksScheduler
from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.sampling_params import SamplingParams
from tests.support.simulated_engine import EOS_TOKEN_ID, SimulatedEngine


class SimulatedRanks:
    """Drives the schedulers of several ranks, up to `run_ahead` + 1 steps in flight."""

    def __init__(self, num_ranks: int, *, run_ahead: int = 1, **sizes: object) -> None:
        shares = FairShares()
        self.engines = [SimulatedEngine(run_ahead=run_ahead, shares=shares, **sizes) for _ in range(num_ranks)]
        self.store = self.engines[0].store  # which all of them share
        self.scheduler = DataRanksScheduler((engine.scheduler for engine in self.engines), shares)
        self.run_ahead = run_ahead
        self.in_flight: deque[DataRanksOutput] = deque()
        self.unassigned: list[Sequence] = []
        self.rank_of: dict[Sequence, int] = {}
        self.ended_unassigned: list[Sequence] = []
        self.num_requests = 0

    @property
    def unfinished(self) -> list[Sequence]:
        return self.unassigned + [sequence for engine in self.engines for sequence in engine.unfinished]

    def add(
        self,
        prompt: list[int],
        *,
        n: int = 1,
        priority: int = 0,
        client: str | None = None,
        cache_salt: str | None = None,
        **sampling: object,
    ) -> list[Sequence]:
        """Adds a request of `n` sequences."""
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})
        max_model_len = self.engines[0].scheduler.max_model_len
        sequences = [
            Sequence(
                SequenceId(f"request-{self.num_requests}", index),
                list(prompt),
                params,
                frozenset({EOS_TOKEN_ID}),
                min(len(prompt) + params.max_tokens, max_model_len),
                arrival=self.num_requests,
                priority=priority,
                client=client,
                cache_salt=cache_salt,
            )
            for index in range(n)
        ]
        self.num_requests += 1
        for sequence in sequences:
            self.scheduler.add_sequence(sequence)
            self.unassigned.append(sequence)
        self.check()
        return sequences

    def schedule(self) -> DataRanksOutput | None:
        drafts = {seq_id: tokens for engine in self.engines for seq_id, tokens in engine._drafts().items()}
        output = self.scheduler.schedule(drafts)
        self._note_assigned()
        if output is None:
            assert self.in_flight or not self.unfinished, "nothing runs and nothing ever will"
        else:
            assert any(part.scheduled for part in output.ranks)
            self.in_flight.append(output)
            for engine, part in zip(self.engines, output.ranks, strict=True):
                if part.scheduled:
                    engine._dispatch(part)
                else:
                    engine._move_blocks(part)
        self.check()
        return output

    def update(self) -> None:
        output = self.in_flight.popleft()
        for engine in self.engines:
            if engine.store is not None:
                engine.store.commit()
        sampled = [
            tokens
            for engine, part in zip(self.engines, output.ranks, strict=True)
            if part.scheduled
            for tokens in engine.in_flight.popleft()[1]
        ]
        tokens = [entry.accepted(own) for entry, own in zip(output.scheduled, sampled, strict=True)]
        sampling = [entry.sequence for entry in output.scheduled if entry.samples]
        expected = [sequence for sequence in sampling if not sequence.status.finished]
        updated = groupby(self.scheduler.update(output, tokens), key=lambda update: update[0])
        assert [sequence for sequence, _ in updated] == expected
        for engine in self.engines:
            engine.unfinished = [sequence for sequence in engine.unfinished if not sequence.status.finished]
        self.check()

    def step(self) -> DataRanksOutput | None:
        output = self.schedule()
        if self.in_flight and (output is None or len(self.in_flight) > self.run_ahead):
            self.update()
        return output

    def finish(self, sequence: Sequence) -> None:
        """Aborts a sequence."""
        assert self.scheduler.abort_sequence(sequence.seq_id) is sequence
        assert sequence.status is SequenceStatus.FINISHED_ABORTED
        if sequence in self.unassigned:
            self.unassigned.remove(sequence)
            self.ended_unassigned.append(sequence)
        else:
            engine = self.engines[self.rank_of[sequence]]
            engine.unfinished.remove(sequence)
            engine.ended_early.add(sequence)
        self.check()

    def drain(self, max_steps: int = 5000) -> None:
        """Runs all to its end: every sequence has its own tokens, and every block is free."""
        for _ in range(max_steps):
            if not self.unfinished and not self.in_flight:
                break
            self.step()
        assert not self.unassigned
        for engine in self.engines:
            engine.drain(0)
        assert not self.scheduler.has_unfinished
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.block_manager.num_free_blocks == self.scheduler.block_manager.num_blocks
        assert not any(sequence.output_token_ids for sequence in self.ended_unassigned)

    def check(self) -> None:
        for engine in self.engines:
            engine.check()
        scheduler = self.scheduler
        assert scheduler.num_running == sum(engine.scheduler.num_running for engine in self.engines)
        assert scheduler.num_running + scheduler.num_waiting == len(self.unfinished)
        assert scheduler.has_unfinished == bool(self.unfinished)
        ranks: dict[str, set[int]] = {}
        for sequence, rank in self.rank_of.items():
            ranks.setdefault(sequence.seq_id.request_id, set()).add(rank)
        assert all(len(each) == 1 for each in ranks.values()), "a request's sequences are on several ranks"

    def _note_assigned(self) -> None:
        for sequence in list(self.unassigned):
            ranks = [i for i, engine in enumerate(self.engines) if sequence.seq_id in engine.scheduler]
            assert len(ranks) <= 1
            for rank in ranks:
                engine = self.engines[rank]
                self.unassigned.remove(sequence)
                self.rank_of[sequence] = rank
                engine.histories[sequence] = list(sequence.prompt_token_ids)
                engine.computed[sequence] = set()
                engine.unfinished.append(sequence)
