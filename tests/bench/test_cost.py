"""Bytes and operations of a step, against arithmetic by hand."""

import numpy as np
import pytest

from jaxis.bench.cost import (
    DecodeCost,
    PrefillCost,
    bytes_read,
    decode_cost,
    decode_cost_of,
    expert_share,
    prefill_cost,
)
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig

FLOAT32 = 4


def test_a_step_reads_the_weights_once_and_every_request_s_context():
    assert (
        DecodeCost(weight_bytes=1000, kv_bytes_per_token=8).step_bytes(batch_size=16, context_len=100) == 1000 + 12800
    )


@pytest.mark.parametrize(
    ("head", "expected"), [({}, 100 + 20), ({"lm_head.weight": 100}, 20 + 100)], ids=["tied", "untied"]
)
def test_an_embedding_table_is_read_whole_only_as_the_output_head(head, expected):
    assert bytes_read({"model.embed_tokens.weight": 100, "model.norm.weight": 20} | head) == expected


def test_the_flops_of_one_token_are_two_a_parameter_and_its_attention():
    cost = PrefillCost(layer_params=1000, head_params=500, attention_flops_per_key=40)
    assert cost.flops(batch_size=1, input_len=1) == 2 * (1000 + 500) + 40
    # Causal: 1 + 2 + 3 keys; the head only for the last token; two requests.
    assert cost.flops(batch_size=2, input_len=3) == 2 * (2 * (3000 + 500) + 40 * 6)


def test_an_engine_s_costs_are_those_of_its_config(llm):
    config = llm.engine.vllm_config.model_config.hf_config.to_dict()
    hidden, ffn, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    vocab = config["vocab_size"]
    projections = 2 * heads * head_dim * hidden + 2 * kv_heads * head_dim * hidden
    layer = projections + 3 * hidden * ffn
    norms = layers * (2 * hidden + 2 * head_dim) + hidden

    cost = prefill_cost(llm.engine.vllm_config)
    assert cost == PrefillCost(layers * layer, vocab * hidden, 4 * heads * head_dim * layers)
    read = decode_cost(llm.engine)
    # Of embedding table and output head, tied or not, one is read.
    assert read.weight_bytes == FLOAT32 * (layers * layer + norms + vocab * hidden)
    assert read.kv_bytes_per_token == FLOAT32 * layers * 2 * kv_heads * head_dim


def test_weight_bytes_name_every_parameter(llm):
    sizes = llm.engine.runner.bytes_by_weight()
    config = llm.engine.vllm_config.model_config.hf_config
    embedding = np.dtype(np.float32).itemsize * config["vocab_size"] * config["hidden_size"]
    [name] = [name for name in sizes if "embed_tokens" in name]
    assert sizes[name] == embedding
    assert sum("q_proj" in name for name in sizes) == config["num_hidden_layers"]


def test_a_step_reads_the_experts_that_its_tokens_go_to():
    weights = {"model.layers.0.mlp.experts.gate_proj": 800, "model.layers.0.mlp.shared_experts.up_proj.weight": 50}
    cost = decode_cost_of(weights | {"model.norm.weight": 10}, 8, 1 / 4)
    assert cost == DecodeCost(weight_bytes=60, kv_bytes_per_token=8, expert_bytes=800, expert_share=0.25)
    assert cost.step_weight_bytes(1) == 60 + 200
    assert cost.step_weight_bytes(2) == 60 + 200 + 150  # of those that are left, a quarter again
    assert cost.step_bytes(2, 10) == 410 + 2 * 10 * 8
    assert cost.held_bytes(20) == 860 + 20 * 8


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_share_of_experts_is_read_from_the_config(key):
    assert expert_share({key: 32, "num_experts_per_tok": 4}) == 1 / 8
    assert expert_share({"num_attention_heads": 4}) == 0


def test_a_prefill_computes_the_experts_that_a_token_goes_to():
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = sizes | {
        **{"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 100, "num_hidden_layers": 3},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 64},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 64},
    }
    cost = prefill_cost(VllmConfig(ModelConfig("", HFConfig(config))))
    attention, router = 32 * 16 * (2 + 1 + 1 + 2), 8 * 32
    assert cost.layer_params == 3 * (attention + router + 2 * 3 * 32 * 24)


def test_latent_attention_computes_with_keys_and_values_of_their_own_sizes():
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
        **{"first_k_dense_replace": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, "rms_norm_eps": 1e-6},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
    }
    cost = prefill_cost(VllmConfig(ModelConfig("", HFConfig(config))))
    assert cost.attention_flops_per_key == 2 * (2 * 4 * (6 + 4) + 2 * 4 * 5)
    attention = 32 * 4 * 10 + 32 * 20 + 16 * 4 * 11 + 4 * 5 * 32
    assert cost.layer_params == 2 * (attention + 3 * 32 * 64)
