"""Gemma 4's published sizes, and what its config.json may say."""

import json
import math

import pytest
import torch
import transformers

from jaxis import LLM, SamplingParams
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.config.hf_config import HFConfig
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.errors import ConfigError
from jaxis.layers.module import named_parameters
from jaxis.models.model_loader import construct_abstractly
from tests.support.parity import (
    FAMILIES,
    GREEDY_TOKENS,
    checkpoint_folder,
    prompt,
    reference_greedy_tokens,
)
from tests.support.places import TESTS

FOLDER = TESTS / "data" / "configs"
SIZES = ("e2b", "e4b", "12b", "26b-a4b", "31b")


def published(size):
    return json.loads((FOLDER / f"gemma-4-{size}.json").read_text())


def construct(values):
    return construct_abstractly(VllmConfig(ModelConfig("it", HFConfig(values), max_model_len=4096)))


def shapes(model):
    known_as = model.checkpoint_names.name_in_checkpoint
    return {known_as(name): tuple(parameter.shape) for name, parameter in named_parameters(model)}


@pytest.mark.slow
@pytest.mark.parametrize("style", ["published", pytest.param("saved by transformers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
def test_a_published_size_has_the_references_parameters(size, style, tmp_path):
    values = published(size)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    if style != "published":
        config.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        assert "global_head_dim" not in values["text_config"]
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config.text_config)
    ours = shapes(construct(values))
    # The reference's scalars are buffers; its experts are stacks of gates and ups together.
    theirs = [*reference.named_parameters(), *reference.named_buffers()]
    expected = {
        name.replace("model.", "model.language_model.", 1): tuple(tensor.shape)
        for name, tensor in theirs
        if "inv_freq" not in name and "embed_scale" not in name
    }
    assert sum(map(math.prod, ours.values())) == sum(map(math.prod, expected.values()))
    assert {name: ours[name] for name in ours if ".experts." not in name} == {
        name: shape for name, shape in expected.items() if ".experts." not in name
    }


def test_layers_share_the_cache_of_the_last_of_their_kind_that_has_one():
    layers = construct(published("e2b")).decoder.layers
    owners = [getattr(layer.self_attn, "shares_cache_of", None) for layer in layers]
    assert owners == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [layer.self_attn.head_dim for layer in layers] == [256, 256, 256, 256, 512] * 7


def test_layers_that_share_must_have_an_owner():
    values = published("e2b")
    values["text_config"] |= {"num_kv_shared_layers": 32}
    with pytest.raises(ConfigError, match=r"num_kv_shared_layers=32, but layer 4 .* 'full_attention' layer"):
        construct(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all', of which only"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input=100 and .*vocab_size=262144"),
        ({"per_layer_config": {"04": 512}}, "per_layer_config=.*, expected an object for layer 4"),
        (
            {"per_layer_config": {"full_attention": {"head_dim": 512}}},
            "an object with an object for each layer",
        ),
        ({"per_layer_config": {"4": {"head_dim": 512, "sinks": 1}}}, "per_layer_config.4.sinks"),
        ({"hidden_act": "silu"}, "hidden_act='silu', of which only 'gelu_pytorch_tanh' is supported"),
    ],
)
def test_what_would_change_answers_is_refused(changes, message):
    values = published("e2b")
    values["text_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        construct(values)


SHARED = next(family for family in FAMILIES if family.name.startswith("Gemma 4, shared"))
SETTINGS = {"dtype": "float32", "kv_cache_memory": "2MiB", "max_model_len": 256, "show_progress": False}


PLACEHOLDER = 130
PROMPT = prompt(60)
assert PLACEHOLDER in PROMPT


@pytest.mark.slow  # test_same_answer.py preempts, and shares no caches
def test_preempted_requests_go_on_as_if_nothing_had_happened():
    """With caches that layers share, in too few blocks for all requests."""
    prompts = [prompt(length) for length in (40, 61, 30)]
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    with LLM(checkpoint_folder(SHARED), **SETTINGS) as llm:
        scheduler = llm.engine.scheduler
        manager = scheduler.block_manager
        num_blocks = {span: pool.num_blocks for span, pool in zip(manager.spans, manager.pools, strict=True)}
        assert len(num_blocks) == 2
        scheduler.block_manager = BlockManager(num_blocks | {FULL_CONTEXT: 8}, 16, enable_prefix_caching=True)
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params)
        assert llm.engine.num_preemptions > 0
    expected = [reference_greedy_tokens(SHARED, tokens) for tokens in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
