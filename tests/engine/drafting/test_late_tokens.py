"""Layers that see tokens late, since no drafts were wanted for a while, draft what they would have drafted anyway."""

from __future__ import annotations

import random

import pytest

from jaxis import SamplingParams
from jaxis.engine.drafting import draft_layers
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.layer_lengths import LayerLengths
from jaxis.engine.drafting.layer_speculation import LayerSpeculation
from jaxis.engine.engine import LLMEngine
from tests.support.draft_runs import make_runner, write_folders
from tests.support.parity import prompt
from tests.support.prediction_checkpoints import WholeDrafts

KINDS = ("grouped", "recurrent", "latent", "chain", "short chain", "step chain", "mimo chain", "eagle3", "draft_model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp)


class Stretches(LayerLengths):
    """Steps without drafts and steps with up to 3 by turns, of random numbers."""

    def __init__(self) -> None:
        super().__init__(int, lambda *_: True, 1 << 20, int)
        self._rng = random.Random(0)
        self._left, self._drafts = 0, True

    def choose(self, places, num_running):
        if self._left == 0:
            self._drafts = not self._drafts
            self._left = self._rng.randint(2, 12) if self._drafts else self._rng.randint(1, 14)
        self._left -= 1
        return [self._rng.randint(0, place.max_drafts) if self._drafts else 0 for place in places]


class Recorded(DraftLayers):
    """Also remembers what was drafted behind which tokens."""

    def __init__(self, engine) -> None:
        super().__init__(engine.runner, 3, lambda *of: engine.scheduler.block_manager.extend(*of))
        self.drafts: list[tuple[list[int], list[int]]] = []
        for key in self.programs(1, 2):
            engine.runner.executor.programs.get(key)  # tokens that would wait for these are never seen

    def propose(self, requests):
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


@pytest.mark.parametrize(
    ("kind", "num_blocks"),
    [
        *[("grouped", None), ("grouped", 9), ("eagle3", None)],
        *[pytest.param(kind, None, marks=pytest.mark.slow) for kind in KINDS if kind not in ("grouped", "eagle3")],
        *[pytest.param(kind, 9, marks=pytest.mark.slow) for kind in KINDS if kind != "grouped"],
    ],
)
def test_late_tokens_change_no_draft_and_no_answer(folders, kind, num_blocks, monkeypatch):
    monkeypatch.setattr(draft_layers, "MAX_UNSEEN_STEPS", 6)
    runner = make_runner(folders[kind], max_num_batched_tokens=16)
    engine = LLMEngine(runner.vllm_config, runner.executor, tokenizer=None, eos_token_ids=frozenset())
    if num_blocks is not None:  # too few for all: sequences are preempted
        engine.runner.num_blocks = dict.fromkeys(runner.num_blocks, num_blocks)
        engine.reset()
    plain = answers(engine, REQUESTS)
    engine.reset()
    num_preemptions = engine.num_preemptions
    drafter = Recorded(engine)
    engine.speculation = LayerSpeculation(drafter, Stretches(), max_drafts=3)
    assert answers(engine, REQUESTS) == plain
    assert (engine.num_preemptions > num_preemptions) == (num_blocks is not None)
    assert drafter.num_late_tokens > 50
    assert len(drafter.drafts) > 20
    drafts_of = WholeDrafts(runner.model, padded=128)
    wrong = [tokens for tokens, guesses in drafter.drafts if drafts_of(tokens, len(guesses))[0] != guesses]
    # Blocks of a sequence that was preempted may be found before the layers have seen their tokens.
    assert not wrong if num_blocks is None else len(wrong) < len(drafter.drafts) / 4
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    engine.close()


def test_what_the_layers_never_see_changes_no_answer(folders, monkeypatch):
    monkeypatch.setattr(draft_layers, "MAX_UNSEEN_STEPS", 4)
    runner = make_runner(folders["grouped"], max_num_batched_tokens=16)
    engine = LLMEngine(runner.vllm_config, runner.executor, tokenizer=None, eos_token_ids=frozenset())
    plain = answers(engine, REQUESTS)
    engine.reset()
    drafter = Recorded(engine)
    drafter.may_catch_up = lambda _: False
    engine.speculation = LayerSpeculation(drafter, Stretches(), max_drafts=3)
    assert answers(engine, REQUESTS) == plain
    assert len(drafter.drafts) > 20
    engine.close()
