"""Several devices inside vLLM: one worker, whose model JAX spreads over them.

There, how a prompt is divided into steps changes the last bits of logits.
"""

import pytest

pytest.importorskip("vllm")

from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, write_checkpoint
from tests.support.vision_checkpoints import write_mistral3

SCRIPT = """
import sys

import jax
import numpy as np

import jaxis
from tests.integrations.vllm.test_images import cases_with_images
from tests.integrations.vllm.test_llm import make_vllm
from tests.integrations.vllm.vllm_requests import TINY_VOCAB_SIZE, Case, jaxis_answers, random_cases, vllm_answers

folder, settings = sys.argv[1], {"tensor_parallel_size": 2, "enable_expert_parallel": sys.argv[2] == "experts"}
if sys.argv[2] == "images":
    greedy = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    cases = [Case(case.prompt, images=case.images, **greedy) for case in cases_with_images(30, seed=21)]
else:
    cases = random_cases(30, seed=21, vocab_size=TINY_VOCAB_SIZE)
llm = make_vllm(folder, kv_cache_memory_bytes=8 << 20, **settings)
reference = jaxis.LLM(
    folder, max_num_seqs=8, max_model_len=256, dtype="float32", seed=3, max_num_batched_tokens=64,
    kv_cache_memory="16MiB", show_progress=False, **settings,
)
worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
assert worker._meshes[0].devices.size == len(jax.devices()) == 2
for case, ours, theirs in zip(cases, vllm_answers(llm, cases), jaxis_answers(reference, cases), strict=True):
    assert ours[:2] == theirs[:2], case
    for mine, other in zip(ours[2] + ours[3], theirs[2] + theirs[3], strict=True):
        assert [each[0] for each in mine] == [each[0] for each in other], case
        np.testing.assert_allclose([each[1] for each in mine], [each[1] for each in other], rtol=1e-4, atol=1e-4)
"""


@pytest.mark.parametrize(
    ("family", "sizes", "experts"),
    [
        ("qwen3", {}, "none"),
        ("qwen3_5_text", DELTA_NET_SIZES, "none"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}, "experts"),
    ],
    ids=["attention", "states", "experts"],
)
def test_two_devices_answer_as_jaxis_does_on_them(tmp_path, family, sizes, experts):
    run_on_devices("-c", SCRIPT, str(write_checkpoint(tmp_path / "model", family, **sizes)), experts, num_devices=2)


def test_images_do_too(tmp_path):
    write_mistral3(tmp_path)
    run_on_devices("-c", SCRIPT, str(tmp_path), "images", num_devices=2)
