"""Bytes and operations of a step, against arithmetic by hand."""

import numpy as np
import pytest

from jaxis.bench.cost import DecodeCost, PrefillCost, bytes_read, decode_cost, prefill_cost

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
    config = llm._engine.vllm_config.model_config.hf_config.to_dict()
    hidden, ffn, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    vocab = config["vocab_size"]
    projections = 2 * heads * head_dim * hidden + 2 * kv_heads * head_dim * hidden
    layer = projections + 3 * hidden * ffn
    norms = layers * (2 * hidden + 2 * head_dim) + hidden

    cost = prefill_cost(llm._engine.vllm_config)
    assert cost == PrefillCost(layers * layer, vocab * hidden, 4 * heads * head_dim * layers)
    read = decode_cost(llm._engine)
    # Of embedding table and output head, tied or not, one is read.
    assert read.weight_bytes == FLOAT32 * (layers * layer + norms + vocab * hidden)
    assert read.kv_bytes_per_token == FLOAT32 * layers * 2 * kv_heads * head_dim


def test_weight_bytes_name_every_parameter(llm):
    sizes = llm._engine.runner.bytes_by_weight()
    config = llm._engine.vllm_config.model_config.hf_config
    embedding = np.dtype(np.float32).itemsize * config["vocab_size"] * config["hidden_size"]
    [name] = [name for name in sizes if "embed_tokens" in name]
    assert sizes[name] == embedding
    assert sum("q_proj" in name for name in sizes) == config["num_hidden_layers"]
