"""Families whose layers differ in more than Llama's do, through the whole engine: cache kinds, chunks, prefix cache."""

import pytest

from jaxis import LLM, SamplingParams
from tests.support import parity
from tests.support.parity import FAMILIES, Family, prompt

# Those of which the engine sees a kind of cache, of layer or of step that the others do not have.
NAMES = (*("GPT-OSS", "StarCoder2, window", "Gemma 4, shared keys and values, embeddings of layers", "Qwen3.5"),)
# To the engine each is as one above; what sets it apart is in the model, whose paged paths test_parity.py compares.
SLOW_NAMES = (
    *("Llama 4", "Mixtral", "Qwen3 MoE", "GLM-4.5 MoE", "OLMo 3, yarn on full layers", "Gemma 3", "Phi-4", "Cohere 2"),
    *("Nemotron 3", "LFM2", "Falcon-H1", "MiniMax M2", "DeepSeek V3"),
    *("Qwen3 MoE, dense layers between, biases", "Llama 4, dense layers between, no norms", "Gemma 2", "OLMo 2"),
    *("GLM-4.5 MoE, groups, two dense layers", "GLM-4-0414", "Granite", "Command R+, norms on heads"),
    *("Gemma 4, experts, values that are keys", "GLM-5.2", "Kimi Linear", "Kimi K3"),
    *("MiniMax M3", "LongCat-Flash-Lite", "Ling 2.5", "Mistral Large 4", "Inkling", "Inkling 2"),
)
NUM_TOKENS = 20
SETTINGS = {
    **{"dtype": "float32", "kv_cache_memory": "2MiB", "show_progress": False},
    # Prompts take several steps, and the engine's requests share them.
    **{"max_num_batched_tokens": 48, "max_num_seqs": 4},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] if family.name in SLOW_NAMES else [], id=family.name)
        for family in FAMILIES
        if family.name in NAMES + SLOW_NAMES
    ],
)
def test_greedy_tokens_equal_transformers_generate(family: Family):
    prompts = [prompt(length) for length in (17, 1, 80)]
    expected = [parity.reference_greedy_tokens(family, tokens)[:NUM_TOKENS] for tokens in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(parity.checkpoint_folder(family), **SETTINGS) as llm:
        for _ in range(2):  # the second time, prompts are in the prefix cache
            outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow
def test_a_context_beyond_the_short_ones_is_served_with_longropes_long_frequencies():
    family = next(f for f in FAMILIES if f.name == "Phi-4-mini, partial longrope, tied")
    tokens = prompt(150)
    params = SamplingParams(temperature=0, max_tokens=parity.GREEDY_TOKENS, ignore_eos=True)
    with LLM(parity.checkpoint_folder(family), max_model_len=256, **SETTINGS) as llm:
        [output] = llm.generate({"prompt_token_ids": tokens}, params)
    assert output.outputs[0].token_ids == parity.reference_greedy_tokens(family, tokens)
