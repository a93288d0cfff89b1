"""Drafters for tests, which know, or do not know, what comes next; and an engine that uses them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxis.engine.drafting.chooser import DraftChooser, Guessed
from jaxis.engine.drafting.prediction import prediction_token_ids
from jaxis.engine.drafting.speculation import Drafter, DraftRequest, Speculation
from jaxis.engine.engine import LLMEngine
from jaxis.engine.speculation import NoSpeculation
from jaxis.sampling_params import SamplingParams


class TestDrafter(Drafter):
    """Asks a function for the draft that follows (prompt, output so far), of a length up to a limit."""

    __test__ = False

    def __init__(self, guess: Callable[[list[int], list[int], int], Sequence[int]]) -> None:
        self._guess = guess

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        return [
            self._guess(sequence.prompt_token_ids, sequence.output_token_ids, limit) for sequence, limit in requests
        ]


Answers = Mapping[tuple[int, ...], Sequence[Sequence[int]]]


def truth(answers: Answers) -> Callable[[list[int], list[int], int], Sequence[int]]:
    """Drafts the known answer: that one of the prompt's answers which begins with the output so far."""

    def guess(prompt: list[int], output: list[int], limit: int) -> Sequence[int]:
        for answer in answers.get(tuple(prompt), ()):
            if list(answer[: len(output)]) == output:
                return list(answer[len(output) : len(output) + limit])
        return []

    return guess


def drafters(answers: Answers, vocab_size: int) -> dict[str, TestDrafter]:
    """Drafters of all kinds, by name."""
    right = truth(answers)
    rng = random.Random(5)

    def changed(prompt: list[int], output: list[int], limit: int) -> Sequence[int]:
        draft = list(right(prompt, output, rng.randint(0, limit)))
        for place in range(len(draft)):
            if rng.random() < 0.25:
                draft[place] = rng.randrange(vocab_size)
        return draft

    return {
        "right": TestDrafter(right),
        "wrong": TestDrafter(lambda p, o, n: [(token + 1) % vocab_size for token in right(p, o, n)] or [1] * n),
        "random": TestDrafter(lambda p, o, n: [rng.randrange(vocab_size) for _ in range(n)]),
        "out of range": TestDrafter(lambda p, o, n: [*right(p, o, 1), vocab_size + 7, -1, 2**40]),
        "changing": TestDrafter(changed),
        "too long": TestDrafter(lambda p, o, n: [*right(p, o, n), *([3] * 100)]),
    }


class AllDrafts(DraftChooser):
    """Gives a sequence as many drafts as it may have."""

    def __init__(self) -> None:
        super().__init__(int, lambda *_: True, 1 << 20)

    is_overdrawn = False

    def choose(self, sequences: Sequence[Guessed], num_running: int) -> list[int]:
        return [each.max_drafts for each in sequences]


class AlwaysSpeculation(Speculation):
    """Has drafts made for every sequence, whatever became of those before."""

    def _begin(self, sequence: Any) -> Any:
        drafting = super()._begin(sequence)
        if drafting is not None:
            self._ready[sequence.seq_id] = drafting
        return drafting

    def _guess(self, drafting: object, *, was_drafted: bool) -> None:
        """Compares nothing: all guesses are computed."""


@contextlib.contextmanager
def drafting(engine: LLMEngine, drafter: Drafter, max_drafts: int) -> Iterator[Speculation]:
    """Has an engine use a drafter, as often and as long as may be."""

    def read_prediction(params: SamplingParams) -> list[int]:
        return prediction_token_ids(params, engine.tokenizer, engine.runner.vocab_size, engine.max_model_len)

    before = engine.speculation
    engine.speculation = AlwaysSpeculation(drafter, AllDrafts(), max_drafts=max_drafts, read_prediction=read_prediction)
    try:
        yield engine.speculation
    finally:
        engine.speculation = before


@contextlib.contextmanager
def without_drafts(engine: LLMEngine) -> Iterator[None]:
    """Has an engine make no drafts in the block."""
    before, engine.speculation = engine.speculation, NoSpeculation()
    try:
        yield
    finally:
        engine.speculation = before
