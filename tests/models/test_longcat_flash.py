"""LongCat-Flash, Flash-Lite and 2.0: keys as published, caches of a layer, drafts, refusals."""

from __future__ import annotations

import json
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.longcat_flash import modeling_longcat_flash as reference

from jaxis import LLM, SamplingParams
from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.errors import ConfigError
from jaxis.layers.indexer import IndexCacheSpec
from jaxis.layers.mla import LatentCacheSpec
from jaxis.layers.module import named_parameters
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support import parity
from tests.support.longcat_ngram_reference import SelectingAttention
from tests.support.prediction_checkpoints import WholeDrafts

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
# As published, without model_type; 2.0's by public tools that name the values.
LITE_SPARSE = {
    **{"architectures": ["LongcatCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "vocab_size": 131072},
    **{"hidden_size": 3072, "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 1024, "num_layers": 14},
    **{"num_attention_heads": 32, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"qk_nope_head_dim": 128, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "routed_scaling_factor": 6.0},
    **{"n_routed_experts": 256, "max_position_embeddings": 983040, "rms_norm_eps": 1e-05, "use_cache": True},
    **{"bos_token_id": 1, "eos_token_id": 2, "rope_theta": 1000000.0, "attention_method": "LSA"},
    "rope_scaling": {
        **{"original_max_position_embeddings": 8192, "rope_type": "deepseek_yarn", "factor": 120, "beta_fast": 32},
        **{"beta_slow": 1, "mscale": 1, "mscale_all_dim": 1},
    },
    **{"zero_expert_num": 128, "zero_expert_type": "identity", "moe_topk": 12, "use_mla": 1, "oe_vocab_size_ratio": 78},
    **{"oe_neighbor_num": 4, "oe_split_num": 4, "mtp_num_layers": 1, "index_n_heads": 16, "index_head_dim": 128},
    **{"index_topk": 2048, "index_k_norm_type": "rms", "cli_factor": 2, "index_local_tokens": 1024},
    "index_init_tokens": 16,
}
LONGCAT_2 = {
    **LITE_SPARSE,
    **{"hidden_size": 8192, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_layers": 38},
    **{"vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 768, "routed_scaling_factor": 9.0},
    **{"max_position_embeddings": 262144, "oe_vocab_size_ratio": 100.567, "oe_neighbor_num": 5, "index_n_heads": 32},
    **{"mtp_num_layers": 3, "mtp_replicate_modules": True, "mtp_disable_over_tokenizer": True, "dsa_mtp_cli": True},
    **{"moe_impl": "mix", "moe_switch_token_num": 1024},
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
    assert billions(LITE_SPARSE) + tables == pytest.approx(68.6, abs=0.5)
    tables = sum((int(100.567 * 163840) + 2 * i + 1) * 512 for i in range(16)) / 1e9
    assert billions(LONGCAT_2) + tables == pytest.approx(1640, abs=10)


def test_a_layer_has_two_caches_and_the_first_of_lite_a_window_of_ids():
    config = settings(LITE, num_layers=2)
    model: Any = construct_abstractly(config)
    assert model.decoder.cache_entries == ((0, 1, 2), (3, 4))
    specs: list[Any] = cache_specs(model, config)
    assert specs[1:] == [LatentCacheSpec(512, 64)] * 4
    assert [(array.shape, array.dtype) for array in specs[0].arrays] == [((3, 1), jnp.int32)]


def test_an_indexer_serves_both_attentions_of_a_layer():
    config = settings(LONGCAT_2, num_layers=2)
    model: Any = construct_abstractly(config)
    assert model.decoder.cache_entries == ((0, 1, 2, 3, 7), (4, 5, 6, 7))
    specs: list[Any] = cache_specs(model, config)
    of_latents, of_keys = LatentCacheSpec(512, 64, num_selected=2048), IndexCacheSpec(128, 32)
    assert specs[1:] == [of_latents, of_keys, of_latents] * 2
    assert [attention.indexer.sizes.always for attention in (model.decoder.layers[1].self_attn[0],)] == [(16, 1024)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_local_tokens": 2040}, "index_topk"),
        ({"index_k_norm_type": "layer"}, "index_k_norm_type"),
        ({"use_longcat_dsa": False}, "use_longcat_dsa"),
        ({"mtp_replicate_modules": False}, "mtp_replicate_modules"),
    ],
    ids=str,
)
def test_what_is_not_implemented_of_an_indexer_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        construct_abstractly(settings(LONGCAT_2, num_layers=1, **changes))
    assert "\n" not in str(caught.value)


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


def embedding_of(model):
    """The embedding of single tokens, which drafts read also where the model has n-grams."""
    embeddings = model.model.embed_tokens
    return getattr(embeddings, "word_embeddings", embeddings)


@torch.no_grad()
def reference_drafts(model, tensors, tokens, number):
    """Drafts by SGLang's `LongcatFlashModelNextN`, of 2.0 with an indexer, after the last token; and their logits."""
    config = model.config
    layer = reference.LongcatFlashDecoderLayer(config, 0)
    selects = getattr(config, "index_topk", None) is not None
    attention = SelectingAttention(config, 0, None) if selects else layer.self_attn[0]
    own = {name.removeprefix("model.mtp.layers.0."): torch.tensor(tensor) for name, tensor in tensors.items()}
    attention.load_state_dict({k.removeprefix("self_attn."): v for k, v in own.items() if k.startswith("self_attn.")})
    mlp, prefix = layer.mlps[0], "transformer_layer.mlp."
    mlp.load_state_dict({k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)})

    def norm(name, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * own[f"{name}.weight"]

    states = model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
    read, drafts, logits = list(tokens[1:]), [], []
    for _ in range(number):
        embedded = embedding_of(model)(torch.tensor([read]))
        x = torch.cat([norm("enorm.m", embedded), norm("hnorm.m", states)], -1) @ own["eh_proj.weight"].T
        places = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        causal = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        x = x + attention(norm("input_layernorm", x), places, causal)[0]
        x = norm("model.mtp.norm", x + mlp(norm("post_attention_layernorm", x)))
        logits.append(model.lm_head(x[0, -1]).numpy())
        drafts.append(int(logits[-1].argmax()))
        read.append(drafts[-1])
        states = torch.cat([states, x[:, -1:]], dim=1)
    return drafts, logits


@pytest.mark.parametrize(
    "name", [*(pytest.param(f"LongCat-Flash{name}", marks=pytest.mark.slow) for name in ("", "-Lite")), "LongCat 2.0"]
)
def test_the_prediction_layer_drafts_as_the_reference_does(name, tmp_path):
    family = next(f for f in parity.FAMILIES if f.name == name)
    model: Any = parity.reference_model(family)
    folder = shutil.copytree(parity.checkpoint_folder(family), tmp_path / "with drafts")
    rng = np.random.default_rng(0)
    size, before = model.config.hidden_size, "model.layers.0."
    tensors = load_file(folder / "model.safetensors")
    drafted = {"model.mtp.norm.weight": 1 + 0.2 * rng.standard_normal(size)}
    for name, tensor in tensors.items():
        for old, new in (
            *((f"{part}.0.", f"{part}.") for part in ("self_attn", "input_layernorm", "post_attention_layernorm")),
            ("mlps.0.", "transformer_layer.mlp."),
        ):
            if name.startswith(before + old):
                drafted[f"model.mtp.layers.0.{new}{name.removeprefix(before + old)}"] = tensor
    for name, shape in (("enorm.m", (size,)), ("hnorm.m", (size,)), ("eh_proj", (size, 2 * size))):
        drafted[f"model.mtp.layers.0.{name}.weight"] = (len(shape) == 1) + 0.2 * rng.standard_normal(shape)
    drafted = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in drafted.items()}
    copies = {"model.mtp.embed_tokens.weight": embedding_of(model).weight.detach().numpy()}
    save_file(tensors | drafted | copies, folder / "model.safetensors", {"format": "pt"})
    if name == "LongCat 2.0":  # the others have one, which no key says
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"mtp_num_layers": 3}))
    model_config = ModelConfig(str(folder), HFConfig.from_folder(folder), max_model_len=1024)
    loaded = load_model(VllmConfig(model_config, load_config=LoadConfig(prediction_layer=True)), make_mesh())
    for length in (2, 17, 50):
        tokens = parity.prompt(length)
        drafts, logits = WholeDrafts(loaded)(tokens, 3)
        expected, expected_logits = reference_drafts(model, drafted, tokens, 3)
        assert drafts == expected
        np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=2e-5 * np.abs(expected_logits).max())


@pytest.mark.parametrize("name", ["LongCat-Flash-Lite", "LongCat 2.0"])
def test_drafts_change_no_token_of_a_model_with_a_window_of_ids(name):
    """Drafts that are rejected have been in the window."""
    family = next(f for f in parity.FAMILIES if f.name == name)
    tokens = parity.prompt(9) * 4
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        options = {"dtype": "float32", "kv_cache_memory": "2MiB", "max_model_len": 128, "show_progress": False}
        with LLM(parity.checkpoint_folder(family), speculative_config=drafts, **options) as llm:
            [output] = llm.generate({"prompt_token_ids": tokens}, params)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1] == parity.reference_greedy_tokens(family, tokens, 40)
