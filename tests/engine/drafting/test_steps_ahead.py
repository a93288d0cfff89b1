"""Layers that see steps as they are dispatched, with tokens in flight, draft what they would draft of known tokens."""

from __future__ import annotations

import random

import pytest

from jaxis import SamplingParams
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.speculation import Speculation
from jaxis.engine.engine import LLMEngine
from tests.engine.drafting.draft_runs import make_runner
from tests.support.drafters import AllDrafts
from tests.support.parity import prompt
from tests.support.prediction_checkpoints import WholeDrafts

KINDS = ("grouped", "recurrent", "latent", "step", "mimo", "eagle3", "draft_model")


class Stretches(AllDrafts):
    """Steps without drafts, which are dispatched ahead, and steps with up to 3 by turns, of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(0)
        self._left, self._drafts = 0, True

    def choose(self, sequences, num_running):
        if self._left == 0:
            self._drafts = not self._drafts
            self._left = self._rng.randint(2, 12) if self._drafts else self._rng.randint(1, 14)
        self._left -= 1
        return [self._rng.randint(0, each.max_drafts) if self._drafts else 0 for each in sequences]


class Recorded(DraftLayers):
    """Also remembers what was drafted behind which tokens, and how often steps were seen with tokens in flight."""

    def __init__(self, engine) -> None:
        super().__init__(engine.runner, 3, lambda *of: engine.scheduler.block_manager.extend(*of))
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.num_seen_ahead = 0

    def propose(self, requests):
        step = self._runner.newest
        self.num_seen_ahead += step is not None and any(e.sequence.num_inflight_tokens for e in step.output.scheduled)
        drafts = super().propose(requests)
        for (sequence, _), guesses in zip(requests, drafts, strict=True):
            if guesses:
                self.drafts.append((sequence.token_ids(0, sequence.num_tokens), list(guesses)))
        return drafts


def answers(engine, requests):
    """The answers to some requests at once, then to what goes on with each of them, which finds its prefix."""
    found = []
    for turn in range(2):
        added = [engine.add_request(f"{turn}.{i}", *each) for i, each in enumerate(requests)]
        while engine.has_unfinished:
            engine.step()
        assert all(each.error is None for each in added)
        outputs = [completion for each in added for completion in each.output().outputs]
        found += [(list(each.token_ids), [str(e) for e in each.logprobs or ()]) for each in outputs]
        requests = [
            ([*ids, *each.output().outputs[0].token_ids, 5, 9], params)
            for (ids, params), each in zip(requests, added, strict=True)
        ]
    return found


REQUESTS = [
    (prompt(20), SamplingParams(temperature=0.0, max_tokens=36, logprobs=2)),
    (prompt(33), SamplingParams(temperature=0.9, seed=3, max_tokens=24, logprobs=2)),
    (prompt(5), SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.5)),
    ([*prompt(9), 3], SamplingParams(temperature=0.0, max_tokens=22, n=2, num_speculative_tokens=0)),
]


@pytest.mark.parametrize("num_blocks", [9, None])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_dispatched_ahead_change_no_draft_and_no_answer(folders, kind, num_blocks):
    runner = make_runner(folders(kind), max_num_batched_tokens=16)
    engine = LLMEngine(runner.vllm_config, runner.programs, tokenizer=None, eos_token_ids=frozenset())
    if num_blocks is not None:  # too few for all: sequences are preempted
        engine.runner.num_blocks = dict.fromkeys(runner.num_blocks, num_blocks)
        engine.reset()
    plain = answers(engine, REQUESTS)
    engine.reset()
    num_preemptions = engine.num_preemptions
    drafter = Recorded(engine)
    engine.speculation = Speculation(drafter, Stretches(), max_drafts=3)
    assert answers(engine, REQUESTS) == plain
    assert (engine.num_preemptions > num_preemptions) == (num_blocks is not None)
    assert drafter.num_seen_ahead > 20
    assert len(drafter.drafts) > 20
    drafts_of = WholeDrafts(runner.model, padded=128)
    for tokens, guesses in drafter.drafts:
        assert drafts_of(tokens, len(guesses))[0] == guesses
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    engine.close()
