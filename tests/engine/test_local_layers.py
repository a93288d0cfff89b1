"""Models whose layers keep windows, chunks, latents or states give the same answers whatever those went through."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from jaxis import SamplingParams, register_model
from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from tests.support.leak_check import no_blocks_leaked
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, LATENT_SIZES, write_checkpoint

NUM_TOKENS = 30
PROMPTS = [np.random.default_rng(i).integers(0, 370, length).tolist() for i, length in enumerate([3, 20, 47, 64, 200])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LAYERS = [
    {"span": AttentionSpan(20)},
    {"span": AttentionSpan(None, 40)},
    {},
    {"span": AttentionSpan(20), "use_rope": False},
]


class LocalLayer(PreNormDecoderLayer):
    """A Llama layer with the options of LAYERS."""

    def __init__(self, scope: LayerScope) -> None:
        attention = GroupedQueryAttention(scope / "self_attn", **LAYERS[scope.layer_index])
        super().__init__(scope, self_attn=attention, mlp=GatedMLP(scope / "mlp"))


class LocalLayersForCausalLM(CausalLM):
    layer_class = LocalLayer


SPANS = {
    "qwen2": [FULL_CONTEXT, AttentionSpan(20)],
    "local layers": [FULL_CONTEXT, AttentionSpan(None, 40), AttentionSpan(20)],
    "mistral": [AttentionSpan(20)],
    "deepseek_v3": [FULL_CONTEXT],
    "qwen3_5_text": [FULL_CONTEXT],
}


@pytest.fixture(scope="module", params=quick_rows(SPANS, ["local layers", "mistral", "qwen3_5_text"]))
def served(request, start_llm, tmp_path_factory):
    """A model, and the tokens that each of PROMPTS is answered with, found without a paged cache."""
    folder, overrides = tmp_path_factory.mktemp("checkpoint"), None
    if request.param == "local layers":
        register_model("LocalLayersForCausalLM", LocalLayersForCausalLM)
        write_checkpoint(folder, "llama", num_hidden_layers=len(LAYERS))
        overrides = {"architectures": ["LocalLayersForCausalLM"], "attention_bias": None, "mlp_bias": None}
    elif request.param == "deepseek_v3":
        write_checkpoint(folder, "deepseek_v3", **LATENT_SIZES)
    elif request.param == "qwen3_5_text":
        write_checkpoint(folder, "qwen3_5_text", **DELTA_NET_SIZES)
    elif request.param == "mistral":
        write_checkpoint(folder, "mistral", sliding_window=20)
    else:
        windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
        write_checkpoint(folder, "qwen2", num_hidden_layers=3, **windows)
    sizes = {"max_num_seqs": 4, "max_model_len": 256}
    with start_llm(folder, hf_overrides=overrides, **sizes) as llm:
        assert list(llm.engine.runner.num_blocks) == SPANS[request.param]
        expected = whole_greedy(llm) if overrides else reference_greedy(folder)
        yield llm, expected


def reference_greedy(folder):
    """By transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    with torch.no_grad():
        for prompt in PROMPTS:
            output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
            answers.append(output[0, len(prompt) :].tolist())
    return answers


def whole_greedy(llm):
    """By the path without a cache: a continuation whose every token is the likeliest after those before it."""
    answers = []
    for prompt in PROMPTS:
        [output] = llm.generate(prompt, GREEDY)
        tokens = output.outputs[0].token_ids
        logits = llm.compute_logits(prompt + tokens[:-1], path="whole")
        answers.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    return answers


def answers(llm, prompts=PROMPTS):
    with no_blocks_leaked(llm):
        outputs = llm.generate(prompts, GREEDY)
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("chunk", [pytest.param(64, marks=pytest.mark.slow), 7])
def test_together_then_found_in_the_prefix_cache(served, chunk):
    llm, expected = served
    llm.engine.reset()
    llm.engine.scheduler.max_num_batched_tokens = chunk
    assert answers(llm) == (expected, [0] * len(PROMPTS))
    found, num_cached = answers(llm, PROMPTS)
    assert found == expected
    assert max(num_cached) > 0


@pytest.mark.sampled(4)
def test_a_next_turn_finds_all_of_the_one_before(served):
    llm, expected = served
    turns = [prompt + tokens + [5, 6] for prompt, tokens in zip(PROMPTS, expected, strict=True)][:3]
    alone = []
    for turn in turns:
        llm.engine.reset()
        alone += answers(llm, [turn])[0]
    llm.engine.reset()
    answers(llm)
    found, num_cached = answers(llm, turns)
    assert found == alone
    # The last token was sampled and never computed.
    assert num_cached == [(len(turn) - 3) // 16 * 16 for turn in turns]


@pytest.mark.sampled(3)
def test_alone(served):
    llm, expected = served
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        llm.engine.reset()
        assert answers(llm, [prompt])[0] == [tokens]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted(served, enable_prefix_caching):
    llm, expected = served
    engine = llm.engine
    engine.reset()
    scarce = {span: 15 if span == FULL_CONTEXT else 24 for span in engine.scheduler.block_manager.spans}
    num_slots = None if engine.runner.num_state_slots is None else 5
    engine.scheduler.block_manager = BlockManager(scarce, 16, enable_prefix_caching, num_slots)
    num_before = engine.num_preemptions
    assert answers(llm)[0] == expected
    assert engine.num_preemptions > num_before or FULL_CONTEXT not in scarce
    assert answers(llm)[0] == expected


@pytest.mark.sampled(3)
def test_shared_prefix_with_other_endings(served):
    """Hits inside a prompt, where windows and chunks begin anywhere."""
    llm, _ = served
    long = PROMPTS[-1]
    prompts = [[*long[:length], 7] for length in (17, 49, 81, 130, 190)]
    llm.engine.reset()
    alone = []
    for prompt in prompts:
        llm.engine.reset()
        alone += answers(llm, [prompt])[0]
    llm.engine.reset()
    answers(llm, [long])
    together, num_cached = answers(llm, prompts)
    assert together == alone
    assert sum(num_cached) > 0


@pytest.mark.sampled(3)
def test_prompt_logits_longer_than_a_window(served):
    llm, _ = served
    token_ids = PROMPTS[-1]
    paged, whole = (llm.compute_logits(token_ids, path=path) for path in ("paged", "whole"))
    np.testing.assert_allclose(paged, whole, atol=1e-4 * np.abs(whole).max())
