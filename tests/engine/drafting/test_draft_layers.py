"""Drafts of layers on the devices: those of whole sequences without a cache, however the sequences were computed."""

from __future__ import annotations

import dataclasses

import pytest

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.models.model_loader import construct_abstractly
from jaxis.parallel.mesh import make_mesh
from tests.engine.drafting.draft_runs import MAX_MODEL_LEN, MODELS, NUM_DRAFTS, drafts_of_whole, make_runner, run
from tests.support.parity import prompt
from tests.support.quick_rows import quick_rows

SLOW = {"groups", "compressed", "gated", "blocks", "step 5"}


@pytest.mark.parametrize("chunk", [7, 1, 64])
@pytest.mark.parametrize("kind", quick_rows(MODELS, MODELS.keys() - SLOW))
def test_drafts_are_those_of_whole_sequences_however_prompts_are_split(folders, kind, chunk):
    runner = make_runner(folders(kind), max_num_batched_tokens=chunk)
    sequences, drafts = run(runner, [prompt(20), prompt(33), prompt(5)], num_tokens=16)
    drafts_of = drafts_of_whole(runner)
    for tokens, by_length in zip(sequences, drafts, strict=True):
        assert len(by_length) > 3
        for length, guesses in by_length.items():
            assert guesses == drafts_of(tokens[:length], NUM_DRAFTS)[0]
    runner.close()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", MODELS)
def test_drafts_are_those_of_whole_sequences_after_wrong_ones(folders, kind):
    runner = make_runner(folders(kind), max_num_batched_tokens=16)
    prompts = [prompt(20), prompt(33), prompt(5)]
    plain, _ = run(runner, prompts, num_tokens=16)
    sequences, drafts = run(runner, prompts, num_tokens=16, expected=plain)
    assert sequences == plain
    assert all(len(by_length) < 14 for by_length in drafts)  # steps gave several tokens
    drafts_of = drafts_of_whole(runner)
    for tokens, by_length in zip(sequences, drafts, strict=True):
        for length, guesses in by_length.items():
            assert guesses == drafts_of(tokens[:length], NUM_DRAFTS)[0]
    runner.close()


@pytest.mark.parametrize(("kind", "num_layers"), [("grouped", 1), ("several", 1)])
def test_the_layers_caches_count_in_the_size_of_a_block(folders, kind, num_layers):
    folder, _ = folders(kind)
    config = VllmConfig(ModelConfig(str(folder), HFConfig.from_folder(folder), max_model_len=MAX_MODEL_LEN))
    with_layer = dataclasses.replace(config, load_config=LoadConfig(prediction_layer=True))
    mesh = make_mesh()
    plans = [plan_kv_caches(construct_abstractly(each), each, mesh, 4 << 20) for each in (config, with_layer)]
    [smaller], [larger] = [plan.bytes_per_block.values() for plan in plans]
    assert larger * 2 == smaller * (2 + num_layers)  # of two layers and so many more
