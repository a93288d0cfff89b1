"""LongCat-Flash and Flash-Lite: keys as published, two caches a layer, drafts with a window of ids, refusals."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jaxis import LLM, SamplingParams
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.errors import ConfigError
from jaxis.layers.mla import LatentCacheSpec
from jaxis.layers.module import named_parameters
from jaxis.models.model_loader import construct_abstractly
from tests.support import parity

FLASH = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    **{"attention_bias": False, "attention_dropout": 0.0, "vocab_size": 131072, "hidden_size": 6144},
    **{"ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_layers": 28, "num_attention_heads": 64},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA", "rms_norm_eps": 1e-05},
    **{"n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256, "zero_expert_type": "identity"},
    **{"routed_scaling_factor": 6.0, "rope_theta": 10000000.0, "max_position_embeddings": 131072, "use_cache": True},
    **{"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"},
}
LITE = {
    **FLASH,
    "architectures": ["LongcatFlashNgramForCausalLM"],
    "model_type": "longcat_flash_ngram",
    **{"hidden_size": 3072, "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 1024, "num_layers": 14},
    **{"num_attention_heads": 32, "n_routed_experts": 256, "zero_expert_num": 128, "rope_theta": 5000000.0},
    **{"max_position_embeddings": 327680, "ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4},
    "rope_scaling": {
        **{"type": "yarn", "factor": 10, "original_max_position_embeddings": 32768, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 1, "mscale_all_dim": 1},
    },
}


def settings(config, **changes):
    return VllmConfig(ModelConfig("published", HFConfig({**config, **changes}), max_model_len=4096))


def billions(config):
    return sum(parameter.size for _, parameter in named_parameters(construct_abstractly(settings(config)))) / 1e9


def test_published_keys_give_the_published_sizes():
    """Parameters as published; those of the tables, of Lite's 68.5 billion, stay in files."""
    assert billions(FLASH) == pytest.approx(560, abs=1)
    tables = sum((78 * 131072 + 2 * i + 1) * 256 for i in range(12)) / 1e9
    assert billions(LITE) + tables == pytest.approx(68.5, abs=0.5)


def test_a_layer_has_two_caches_and_the_first_of_lite_a_window_of_ids():
    config = settings(LITE, num_layers=2)
    model: Any = construct_abstractly(config)
    assert model.decoder.cache_entries == ((0, 1, 2), (3, 4))
    specs: list[Any] = cache_specs(model, config)
    assert specs[1:] == [LatentCacheSpec(512, 64)] * 4
    assert [(array.shape, array.dtype) for array in specs[0].arrays] == [((3, 1), jnp.int32)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_expert_type": "drop"}, "zero_expert_type"),
        ({"attention_method": "MHA"}, "attention_method"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora"),
        ({"router_bias": True}, "router_bias"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"use_longcat_dsa": True}, "use_longcat_dsa"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        construct_abstractly(settings(LITE, num_layers=1, **changes))
    assert "\n" not in str(caught.value)


def test_drafts_change_no_token_of_a_model_with_a_window_of_ids():
    """Drafts that are rejected have been in the window."""
    family = next(f for f in parity.FAMILIES if f.name == "LongCat-Flash-Lite")
    tokens = parity.prompt(9) * 4
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        options = {"dtype": "float32", "kv_cache_memory": "2MiB", "max_model_len": 128, "show_progress": False}
        with LLM(parity.checkpoint_folder(family), speculative_config=drafts, **options) as llm:
            [output] = llm.generate({"prompt_token_ids": tokens}, params)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1] == parity.reference_greedy_tokens(family, tokens, 40)
