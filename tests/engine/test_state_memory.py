"""More requests than there is memory for, of families whose layers carry a state: each is answered as when alone."""

from __future__ import annotations

import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from tests.support import parity
from tests.support.leak_check import no_blocks_leaked
from tests.support.parity import FAMILIES

NUM_REQUESTS = 64


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 100 tokens, of which every third goes on from a beginning that others have too."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 131, 60).tolist()
    prompts = [rng.integers(1, 131, rng.integers(1, 101)).tolist() for _ in range(NUM_REQUESTS)]
    prompts[::3] = [shared[: rng.integers(20, 61)] + prompt[:40] for prompt in prompts[::3]]
    counts = rng.integers(1, 41, NUM_REQUESTS)
    return [
        ({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=int(count), ignore_eos=True))
        for prompt, count in zip(prompts, counts, strict=True)
    ]


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron 3", "LFM2"])
def test_64_requests_in_a_cache_too_small_for_them_are_each_answered_as_alone(name: str) -> None:
    [family] = [family for family in FAMILIES if family.name == name]
    with LLM(
        parity.checkpoint_folder(family),
        **{"dtype": "float32", "kv_cache_memory": "384KiB", "max_model_len": 160, "show_progress": False},
        **{"max_num_batched_tokens": 64, "max_num_seqs": 32},
    ) as llm:
        engine = llm.engine
        prompts, params = zip(*requests(), strict=True)
        alone = []
        for prompt, param in zip(prompts, params, strict=True):
            engine.reset()
            alone += llm.generate([prompt], [param])
        engine.reset()
        preemptions = engine.num_preemptions
        with no_blocks_leaked(llm):
            together = llm.generate(list(prompts), list(params))
        assert engine.num_preemptions > preemptions
    for i, (ours, expected) in enumerate(zip(together, alone, strict=True)):
        assert ours.outputs[0].token_ids == expected.outputs[0].token_ids, i
