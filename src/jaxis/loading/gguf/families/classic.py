"""GPT-2 and what followed it: layer norms, packed projections, ALiBi."""

from __future__ import annotations

import dataclasses

from jaxis.config.hf_config import HFConfig
from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, BASE, CLASSIC, DENSE, HEAD_SIZES, MLP_BIAS
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, FileKeys, Written, constant, has, key, only, unused
from jaxis.loading.gguf.tensor_names import OF_EACH_HEAD, PACKED, GGUFNames, each, renames_of

_PACKED_BY_GROUP = GGUFNames(PACKED, groups_qkv=True)
_PARTIAL_ROPE = rope(is_partial=True)


def _has_two_norms(reader: ConfigReader) -> bool:
    return reader.keys.has_tensor("attn_norm_2.weight")


def _falcon_heads(reader: ConfigReader) -> Values:
    """Falcon 7B and 40B differ in their norms and in the heads that share keys."""
    return {
        "new_decoder_architecture": reader.num_kv_heads > 1,
        "num_kv_heads": reader.num_kv_heads,
        "num_ln_in_parallel_attn": 2 if _has_two_norms(reader) else 1,
    }


_FALCON = (
    [CLASSIC, rope(), Fact(_falcon_heads), has("bias", "attn_qkv.bias")],
    constant("multi_query", True),
    constant("parallel_attn", True),
)
_FALCON_MODEL = ("falcon", "falcon", "FalconForCausalLM")
# Where all blocks have one norm, the checkpoint has its usual name.
_ONE_NORM = dataclasses.replace(
    _PACKED_BY_GROUP,
    renames=[rename for rename in renames_of("FalconForCausalLM") if rename[0] != ".input_layernorm."],
)


def _alibi(reader: ConfigReader) -> Values:
    """MPT's biases by distance; models without them are not supported."""
    greatest, clip = (reader.keys.get(f"attention.{key}") for key in ("max_alibi_bias", "clamp_kqv"))
    return {"attn_config": {"alibi": (greatest or 0.0) > 0, "alibi_bias_max": greatest, "clip_qkv": clip}}


def _stablelm_blocks(reader: ConfigReader) -> Values:
    """The reference's arithmetic follows from the norms that there are."""
    return {"use_parallel_residual": not reader.keys.has_tensor("ffn_norm.weight")}


def _read_starcoder2_window(reader: ConfigReader) -> Values:
    window = reader.keys.get("attention.sliding_window")
    if window is None and reader.num_layers in (30, 32, 40):  # those of 3, 7 and 15 billion parameters
        window = reader.keys.assume("sliding_window", 4096)
    return {"sliding_window": window or None}


def _write_window(config: HFConfig) -> FileKeys:
    window = config.get("sliding_window")
    return {} if window is None else {"attention.sliding_window": window}


GGUFS = (
    # With the names that jaxis itself writes.
    GGUF(("gpt2", "gpt2", "GPT2LMHeadModel"), CLASSIC, GGUFNames(PACKED), without=HEAD_SIZES),
    # StarCoder and SantaCoder, whose heads share a key and a value.
    GGUF(
        ("starcoder", "gpt_bigcode", "GPTBigCodeForCausalLM"),
        (CLASSIC, only("attention.head_count_kv", 1), constant("multi_query", True)),
        GGUFNames(PACKED),
        without=HEAD_SIZES,
    ),
    # GPT-NeoX and Pythia.
    GGUF(
        ("gptneox", "gpt_neox", "GPTNeoXForCausalLM"),
        (
            [CLASSIC, _PARTIAL_ROPE],
            key("use_parallel_residual", "use_parallel_residual", True, bool, is_assumed=True),
        ),
        _PACKED_BY_GROUP,
        without=HEAD_SIZES,
    ),
    GGUF(
        _FALCON_MODEL,
        _FALCON,
        GGUFNames(
            {**PACKED, "attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}, groups_qkv=True
        ),
        when=_has_two_norms,
        without=HEAD_SIZES,
    ),
    GGUF(_FALCON_MODEL, _FALCON, _ONE_NORM, without=HEAD_SIZES),
    GGUF(
        ("bloom", "bloom", "BloomForCausalLM"),
        CLASSIC,
        GGUFNames(PACKED, groups_qkv=True, top_level={"token_embd_norm": "model.embed_norm"}),
        without=(*HEAD_SIZES, "max_position_embeddings", "intermediate_size"),
    ),
    GGUF(
        ("mpt", "mpt", "MptForCausalLM"),
        (CLASSIC, Fact(_alibi)),
        GGUFNames(PACKED),
        without=(*HEAD_SIZES, "intermediate_size"),
    ),
    # StableLM 2 and StableLM Zephyr 3B.
    GGUF(
        ("stablelm", "stablelm", "StableLmForCausalLM"),
        (
            [CLASSIC, _PARTIAL_ROPE, Fact(_stablelm_blocks), unused("use_parallel_residual")],
            has("use_qkv_bias", "attn_q.bias"),
            has("qk_layernorm", "attn_q_norm.weight"),
        ),
        GGUFNames(each("q k", "attn_{}_norm", f"self_attn.{{}}_norm.norms{OF_EACH_HEAD}")),
    ),
    # Nemotron 4 and Minitron.
    GGUF(
        ("nemotron", "nemotron", "NemotronForCausalLM"),
        (
            [BASE, DENSE, _PARTIAL_ROPE, ATTENTION_BIAS, MLP_BIAS],
            key("norm_eps", "attention.layer_norm_epsilon", kind=float),
        ),
        GGUFNames(adds_one_to_norms=True),
    ),
    GGUF(
        ("starcoder2", "starcoder2", "Starcoder2ForCausalLM"),
        (
            [BASE, DENSE, rope(), has("use_bias", "attn_q.bias"), constant("hidden_act", "gelu_pytorch_tanh")],
            key("norm_epsilon", "attention.layer_norm_epsilon", kind=float),
            Fact(_read_starcoder2_window, _write_window),
        ),
        written=Written(biases=True),
    ),
)
