"""Phi 2 and 3, and Phi-3.5-MoE."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, CLASSIC, HEAD_SIZES, WINDOW, experts, usual
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, FileKeys, Written, constant, has
from jaxis.loading.gguf.tensor_names import GATE_UP, PACKED, W1_W3_W2, GGUFNames

# Of Phi-3.5-MoE, which the keys have otherwise or not at all: llama.cpp computes the attention factor as Phi-3's, and
# chooses experts by their scores alone.
_MSCALE, _JITTER = 1.243163121016122, 0.01


def _read_phi3(reader: ConfigReader) -> Values:
    values: Values = {"original_max_position_embeddings": reader.original_context}
    if (scaling := reader.long_factors()) is not None:
        factor = reader.keys.get("rope.scaling.attn_factor")
        values["rope_scaling"] = scaling | {"attention_factor": factor}
    return values


def _write_phi3(config: HFConfig) -> FileKeys:
    return {
        "attention.sliding_window": config.get("sliding_window", 0),
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
    }


def _phimoe(reader: ConfigReader) -> Values:
    reader.keys.expect("attention.sliding_window", 0, reader.keys.get("context_length"))
    if (scaling := reader.long_factors()) is None:
        return {}
    mscale = reader.keys.assume("short_mscale", _MSCALE)
    mscales = {"short_mscale": mscale, "long_mscale": mscale}
    return {"rope_scaling": scaling | mscales | {"original_max_position_embeddings": reader.original_context}}


GGUFS = (
    GGUF(
        ("phi2", "phi", "PhiForCausalLM"),
        (CLASSIC, rope(is_partial=True)),
        without=HEAD_SIZES,
    ),
    GGUF(
        ("phi3", "phi3", "Phi3ForCausalLM"),
        (usual(), WINDOW, Fact(_read_phi3, _write_phi3)),
        GGUFNames(PACKED | GATE_UP),
        written=Written(),
    ),
    GGUF(
        ("phimoe", "phimoe", "PhimoeForCausalLM"),
        (
            [usual(), ATTENTION_BIAS, experts("num_local_experts"), Fact(_phimoe)],
            constant("router_jitter_noise", _JITTER, is_assumed=True),
            has("lm_head_bias", "output.bias"),
            constant("sliding_window", None),
        ),
        GGUFNames(projections=W1_W3_W2),
    ),
)
