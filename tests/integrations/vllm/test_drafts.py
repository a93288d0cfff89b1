"""Speculative tokens inside vLLM, which jaxis' n-gram lookup guesses, change no answer."""

import os

import numpy as np
import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

import jaxis
from jaxis.integrations.vllm.model_runner import rows_of_requests
from tests.integrations.vllm.test_llm import ENGINE, check, make_vllm, metric, set_contract
from tests.integrations.vllm.vllm_requests import Case, random_cases
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, write_checkpoint

LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def reference():
    return jaxis.LLM(**ENGINE, max_num_batched_tokens=64, kv_cache_memory="64MiB", show_progress=False)


def repeating_cases(number, seed):
    """Prompts that repeat themselves, and random parameters but for those that vLLM refuses beside drafts."""
    cases = random_cases(number, seed=seed, longest=20, most_tokens=60)
    for case in cases:
        for name in ("min_p", "logit_bias"):
            case.values.pop(name, None)
    return [Case(case.prompt * 3, regex=case.regex, choice=case.choice, **case.values) for case in cases]


def check_drafts(llm):
    accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    assert 50 < accepted < metric(llm, "vllm:spec_decode_num_draft_tokens")


def test_requests_with_random_parameters_and_drafts_get_the_same_answers(reference):
    llm = make_vllm(speculative_config=LOOKUP)
    assert not llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    check(llm, reference, repeating_cases(120, seed=31))
    check_drafts(llm)


@pytest.mark.parametrize("contract", ["V1", "V2"])
def test_preempted_ones_do_too(reference, contract):
    llm = make_vllm(num_gpu_blocks_override=24, speculative_config=LOOKUP)
    set_contract(llm, contract)
    cases = [
        Case([7 * i + k for k in range(8)] * 3, max_tokens=90, ignore_eos=True, logprobs=2, temperature=0.0)
        for i in range(8)
    ]
    check(llm, reference, cases)
    assert metric(llm, "vllm:num_preemptions") > 0
    check_drafts(llm)


@pytest.mark.parametrize(("needed", "first"), [([2, 3, 1], [0, 2, 5]), ([2, 1], [0, 3]), ([3, 3], [0, 3])])
def test_the_rows_of_a_request_are_packed_or_at_equal_distances(needed, first):
    bitmask = np.arange(12).reshape(6, 2)
    for rows, number, start in zip(rows_of_requests(bitmask, needed), needed, first, strict=True):
        np.testing.assert_array_equal(rows, bitmask[start : start + number])


def test_of_recurrent_states_they_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3_5_text", **DELTA_NET_SIZES)
    with pytest.raises(ValueError, match=r"speculative_config: .* has layers with a recurrent state"):
        make_vllm(folder, speculative_config=LOOKUP)
