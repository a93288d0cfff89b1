"""Mistral Large 4: whose latents and selections layers read, caches, refusals, drafts."""

from __future__ import annotations

from typing import Any

import pytest

from jaxis import LLM, SamplingParams
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.errors import ConfigError
from jaxis.layers.indexer import IndexCacheSpec
from jaxis.layers.mla import LatentCacheSpec
from jaxis.models.model_loader import construct_abstractly
from tests.support import parity

# transformers' defaults, which have the sizes of the release notes, and fewer layers.
TEXT = {
    "model_type": "mistral_large4_text",
    **{"vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576, "moe_intermediate_size": 6144},
    **{"num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1},
    **{"n_routed_experts": 128, "num_experts_per_tok": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    **{"qk_nope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576},
    **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "first_k_dense_replace": 1},
    **{"no_rope_layers": [1, 0, 1, 1, 0, 1], "kv_source_layers": [0, 1, 2, 2, 1, 2]},
    "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "original_max_position_embeddings": 512},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0},
    },
}


def settings(**changes):
    config = {"architectures": ["MistralLarge4ForConditionalGeneration"], "model_type": "mistral_large4"}
    text = {"text_config": {**TEXT, **changes}, "vision_config": {"model_type": "pixtral"}}
    return VllmConfig(ModelConfig("published", HFConfig({**config, **text}), max_model_len=8192))


def test_a_layer_that_reads_an_earlier_layers_latents_has_its_cache_and_only_an_indexers_of_its_own():
    config = settings()
    model: Any = construct_abstractly(config)
    assert model.decoder.cache_entries == ((0, 1, 6), (2, 3, 6), (4, 6), (4, 5, 6), (2, 6), (4, 6))
    rope, nope, index = LatentCacheSpec(512, 64, 2048), LatentCacheSpec(512, 0, 2048), IndexCacheSpec(128, 32)
    assert cache_specs(model, config) == [rope, index, nope, index, rope, index]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layers": [0, 1, 2]}, "kv_source_layers"),
        ({"kv_source_layers": [0, 1, 2, 2, 2, 2]}, "layer 4 does not read the last one of its kind"),
        ({"kv_source_layers": [0, 1, 2, 3, 1, 2]}, None),
        ({"kv_source_layers": [0, 1, 0, 3, 4, 5]}, None),
        ({"kv_source_layers": [0, 1, 2, 0, 1, 2]}, "layer 3 does not read the last one of its kind"),
        ({"indexer_types": ["shared"] * 6}, "indexer_types"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types"),
    ],
    ids=str,
)
def test_what_the_reference_would_read_otherwise_is_refused(changes, message):
    if message is None:
        construct_abstractly(settings(**changes))
        return
    with pytest.raises(ConfigError, match=message) as caught:
        construct_abstractly(settings(**changes))
    assert "\n" not in str(caught.value)


def test_a_context_that_is_selected_whole_and_one_that_is_not_are_served_with_drafts():
    family = next(f for f in parity.FAMILIES if f.name == "Mistral Large 4")
    tokens = parity.prompt(9) * 4
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory": "4MiB",
        "max_model_len": 128,
        "show_progress": False,
    }
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        with LLM(parity.checkpoint_folder(family), speculative_config=drafts, **options) as llm:
            [output] = llm.generate({"prompt_token_ids": tokens}, params)
        assert output.outputs[0].token_ids == parity.reference_greedy_tokens(family, tokens, 40)
    options["max_model_len"] = 8
    with LLM(parity.checkpoint_folder(family), **options) as llm:
        [output] = llm.generate({"prompt_token_ids": tokens[:4]}, SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].token_ids == parity.reference_greedy_tokens(family, tokens[:4], 4)
