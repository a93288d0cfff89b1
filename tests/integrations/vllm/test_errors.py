"""A fault of one request inside vLLM ends that request alone, and the engine goes on."""

import os

import numpy as np
import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")

from safetensors.numpy import load_file, save_file
from vllm.exceptions import VLLMValidationError

import jaxis
from tests.integrations.vllm.test_llm import ENGINE, make_vllm
from tests.integrations.vllm.vllm_requests import Case, jaxis_answers, vllm_answers
from tests.support.tiny_checkpoints import variant, write_checkpoint

FAULTY_TOKEN = 77


@pytest.fixture(scope="module")
def faulty_model(tmp_path_factory):
    """A model that has no finite logits after one token."""
    root = tmp_path_factory.mktemp("models")
    source = write_checkpoint(root / "source", "qwen3")
    folder = variant(root / "model", source, files={"model.safetensors": None})
    tensors = load_file(source / "model.safetensors")
    assert "lm_head.weight" in tensors  # the table is that of the input alone
    tensors["model.embed_tokens.weight"][FAULTY_TOKEN] = np.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def good_cases():
    return [
        Case([5 + i, 9, 11 + i], temperature=1.0, seed=i, max_tokens=20, logprobs=2, logit_bias={FAULTY_TOKEN: -100.0})
        for i in range(12)
    ]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_logits_that_are_not_finite(faulty_model, async_scheduling):
    llm = make_vllm(faulty_model, async_scheduling=async_scheduling)
    reference = jaxis.LLM(
        faulty_model, **ENGINE, max_num_batched_tokens=64, kv_cache_memory="16MiB", show_progress=False
    )
    cases = good_cases()
    wanted = jaxis_answers(reference, cases)
    faulty = Case([5, FAULTY_TOKEN, 6], max_tokens=8, temperature=1.0, seed=1)
    end = llm.get_tokenizer().eos_token_id
    for _ in range(2):
        first, *found, last = vllm_answers(llm, [faulty, *cases, faulty])
        assert found == wanted
        assert [(each[0], each[1]) for each in (first, last)] == [([end], "stop")] * 2


def test_parameters_that_are_refused(faulty_model):
    llm, cases = make_vllm(faulty_model), good_cases()
    alone = vllm_answers(llm, cases)
    for case in cases[:6]:
        llm.llm_engine.add_request(f"kept {case.values['seed']}", case.vllm_prompt, case.vllm_params)
    refused = Case([5, 6], repetition_penalty=1000.0)
    with pytest.raises(VLLMValidationError, match="repetition_penalty=1000"):
        llm.llm_engine.add_request("refused", refused.vllm_prompt, refused.vllm_params)
    finished = 0
    while llm.llm_engine.has_unfinished_requests():
        finished += sum(output.finished for output in llm.llm_engine.step())
    assert finished == 6
    assert vllm_answers(llm, cases) == alone
