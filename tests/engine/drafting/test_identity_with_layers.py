"""Layers on the devices that draft change no answer: tokens, bit-identical log-probabilities, finish reasons."""

from __future__ import annotations

import pytest

from jaxis import SamplingParams
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.speculation import Speculation
from jaxis.engine.engine import LLMEngine
from tests.engine.drafting.draft_runs import MODELS, make_runner
from tests.support.drafters import AllDrafts
from tests.support.dspark import write_last_token_dspark_checkpoint
from tests.support.parity import prompt
from tests.support.prediction_checkpoints import family, write_last_token_checkpoint
from tests.support.stream_predictions import FORMS, write_last_token_streams_checkpoint

REQUESTS = [
    (prompt(20), SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)),
    (prompt(45), SamplingParams(temperature=2.0, seed=4, max_tokens=15, logprobs=2, top_k=40)),
    (prompt(33), SamplingParams(temperature=0.0, max_tokens=1)),
    ([*prompt(32), 5], SamplingParams(temperature=0.5, n=2, seed=1, max_tokens=8, logprobs=0)),
]


def answers(engine):
    """Each request's answers, while all run together, and later requests find prefixes of the earlier."""
    return [found for start in range(0, len(REQUESTS), 2) for found in together(engine, REQUESTS[start : start + 2])]


def together(engine, given):
    """The answers of requests that run at once."""
    requests = [engine.add_request(str(i), *request) for i, request in enumerate(given)]
    while engine.has_unfinished:
        engine.step()
    found = []
    for request in requests:
        assert request.error is None
        for completion in request.output().outputs:
            logprobs = [{t: v.logprob.hex() for t, v in each.items()} for each in completion.logprobs or ()]
            found.append((list(completion.token_ids), completion.finish_reason, logprobs))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("kind", MODELS)
def test_drafts_of_layers_change_no_answer(folders, kind):
    runner = make_runner(folders(kind), max_num_batched_tokens=16)
    engine = LLMEngine(runner.vllm_config, runner.programs, tokenizer=None, eos_token_ids=frozenset({7}))
    plain = answers(engine)
    engine.reset()
    drafter = DraftLayers(engine.runner, 3, lambda *of: engine.scheduler.block_manager.extend(*of))
    engine.speculation = Speculation(drafter, AllDrafts(), max_drafts=3)
    assert answers(engine) == plain
    assert engine.speculation.counts.num_draft_tokens > 20
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["groups", "streams", "compressed", "gated"])
def test_drafts_of_layers_change_no_answer_of_preempted_sequences(folders, kind):
    # Of 16 tokens, for two of the three sequences.
    runner = make_runner(folders(kind), 16, num_blocks=10)
    engine = LLMEngine(runner.vllm_config, runner.programs, tokenizer=None, eos_token_ids=frozenset())
    requests = [(prompt(n), SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)) for n in (20, 33, 30)]
    plain = [found for request in requests for found in together(engine, [request])]
    assert engine.num_preemptions == 0
    engine.reset()
    drafter = DraftLayers(engine.runner, 3, lambda *of: engine.scheduler.block_manager.extend(*of))
    engine.speculation = Speculation(drafter, AllDrafts(), max_drafts=3)
    assert together(engine, requests) == plain
    assert engine.num_preemptions > 0
    assert engine.speculation.counts.num_draft_tokens > 20
    engine.close()


def test_a_drafter_that_is_the_model_itself_is_always_right(folders):
    """The layers see what the model sees: each step gives all drafts and one token more."""
    target = folders("draft_model")[0]
    check_always_right((target, target))


def test_a_layer_that_predicts_as_the_model_does_is_always_right(tmp_path):
    check_always_right((write_last_token_checkpoint(tmp_path, family("GLM-4.5 MoE", head_dim=32)), None))


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_that_predicts_as_a_model_with_streams_does_is_always_right(tmp_path, name):
    check_always_right((write_last_token_streams_checkpoint(tmp_path, name), None))


@pytest.mark.slow
def test_a_block_of_layers_that_draft_as_the_model_does_is_always_right(tmp_path):
    check_always_right((write_last_token_dspark_checkpoint(tmp_path), None), num_drafts=5)


def check_always_right(pair, num_drafts=3):
    runner = make_runner(pair, max_num_batched_tokens=16)
    engine = LLMEngine(runner.vllm_config, runner.programs, tokenizer=None, eos_token_ids=frozenset())
    drafter = DraftLayers(engine.runner, num_drafts, lambda *of: engine.scheduler.block_manager.extend(*of))
    engine.speculation = Speculation(drafter, AllDrafts(), max_drafts=num_drafts)
    requests = [
        engine.add_request(str(n), prompt(n), SamplingParams(temperature=0.0, max_tokens=17)) for n in (20, 33, 5)
    ]
    while engine.has_unfinished:
        engine.step()
    counts = engine.speculation.counts
    assert all(len(request.output().outputs[0].token_ids) == 17 for request in requests)
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 30
    engine.close()
