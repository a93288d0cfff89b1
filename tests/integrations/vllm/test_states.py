"""Models with recurrent states inside vLLM, whose scheduler knows blocks alone."""

import os
from pathlib import Path

import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

import jaxis
from tests.integrations.vllm.test_llm import ENGINE, check, long_cases, make_vllm, metric, set_contract
from tests.integrations.vllm.vllm_requests import TINY_VOCAB_SIZE, random_cases
from tests.support.parity import checkpoint_folder
from tests.support.prediction_checkpoints import family
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, write_checkpoint, write_tokenizer

MEMORY = 16 << 20


@pytest.fixture(scope="module")
def delta_net(tmp_path_factory):
    """Two layers of three with a gated delta rule."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "delta_net", "qwen3_5_text", **DELTA_NET_SIZES)


@pytest.fixture(scope="module")
def reference(delta_net):
    return jaxis_llm(delta_net)


def jaxis_llm(folder):
    return jaxis.LLM(folder, **ENGINE, max_num_batched_tokens=64, kv_cache_memory=MEMORY, show_progress=False)


def make(folder, **arguments):
    return make_vllm(folder, kv_cache_memory_bytes=MEMORY, **arguments)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 16])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_hybrid_model_answers_as_jaxis_does(delta_net, reference, max_num_batched_tokens, async_scheduling):
    llm = make(delta_net, max_num_batched_tokens=max_num_batched_tokens, async_scheduling=async_scheduling)
    check(llm, reference, random_cases(40, seed=11, vocab_size=TINY_VOCAB_SIZE))
    assert metric(llm, "vllm:prefix_cache_hits") == 0


@pytest.mark.parametrize("contract", ["V1", "V2"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preempted_requests_do_too(delta_net, reference, contract, async_scheduling):
    llm = make(delta_net, num_gpu_blocks_override=20, async_scheduling=async_scheduling)
    set_contract(llm, contract)
    check(llm, reference, long_cases())
    assert metric(llm, "vllm:num_preemptions") > 0


@pytest.mark.parametrize("name", ["Falcon Mamba", "Mamba2", "Jamba", "LFM2"])
def test_other_states_and_models_without_attention_do_too(name):
    folder = Path(checkpoint_folder(family(name, vocab_size=512)))
    write_tokenizer(folder)
    check(make(folder), jaxis_llm(folder), random_cases(24, seed=12, vocab_size=TINY_VOCAB_SIZE))


def test_states_for_which_there_is_no_room_are_refused(delta_net):
    with pytest.raises(ValueError, match=r"max_num_seqs=64 sequences have recurrent states of .*: give max_num_seqs="):
        make_vllm(delta_net, kv_cache_memory_bytes=1 << 17, max_num_seqs=64)
