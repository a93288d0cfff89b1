"""Configs of GPT-2 and what followed it, of Gemma 1, and of near-Llamas, from the keys of GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxis.loading.gguf.config_reader import ConfigReader, Values


def _gpt2(reader: ConfigReader) -> Values:
    return _classic(reader, "GPT2LMHeadModel", "gpt2")


def _starcoder(reader: ConfigReader) -> Values:
    """StarCoder and SantaCoder, whose heads share a key and a value."""
    reader.keys.expect("attention.head_count_kv", 1)
    return {**_classic(reader, "GPTBigCodeForCausalLM", "gpt_bigcode"), "multi_query": True}


def _gptneox(reader: ConfigReader) -> Values:
    """GPT-NeoX and Pythia."""
    return {
        **_classic(reader, "GPTNeoXForCausalLM", "gpt_neox"),
        **_partial_rope(reader),
        "use_parallel_residual": reader.keys.get_or_assume("use_parallel_residual", "use_parallel_residual", True),
    }


def _falcon(reader: ConfigReader) -> Values:
    """Falcon 7B and 40B, which differ in their norms and in the heads that share keys."""
    keys = reader.keys
    is_new = reader.num_kv_heads > 1
    has_two_norms = keys.has_tensor("attn_norm_2.weight")
    if has_two_norms:
        reader.names = "falcon with two norms"
    return {
        **_classic(reader, "FalconForCausalLM", "falcon"),
        **reader.rope(),
        "new_decoder_architecture": is_new,
        "num_kv_heads": reader.num_kv_heads,
        "multi_query": True,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "parallel_attn": True,
        "bias": keys.has_tensor("attn_qkv.bias"),
    }


def _bloom(reader: ConfigReader) -> Values:
    values = _classic(reader, "BloomForCausalLM", "bloom")
    return {key: value for key, value in values.items() if key not in ("max_position_embeddings", "intermediate_size")}


def _mpt(reader: ConfigReader) -> Values:
    """MPT; only models with ALiBi."""
    keys = reader.keys
    values = _classic(reader, "MptForCausalLM", "mpt")
    del values["intermediate_size"]
    biases = {"alibi": keys.get("attention.max_alibi_bias", 0.0) > 0}
    limits = {"alibi_bias_max": keys.get("attention.max_alibi_bias"), "clip_qkv": keys.get("attention.clamp_kqv")}
    return {**values, "attn_config": biases | limits}


def _phi2(reader: ConfigReader) -> Values:
    return {**_classic(reader, "PhiForCausalLM", "phi"), **_partial_rope(reader)}


def _stablelm(reader: ConfigReader) -> Values:
    """StableLM 2 and StableLM Zephyr 3B."""
    keys = reader.keys
    keys.get("use_parallel_residual")  # what the reference computes with follows from the norms that there are
    return {
        **reader.base("StableLmForCausalLM", "stablelm"),
        **reader.dense(),
        **_partial_rope(reader),
        "layer_norm_eps": keys.require("attention.layer_norm_epsilon"),
        "use_parallel_residual": not keys.has_tensor("ffn_norm.weight"),
        "use_qkv_bias": keys.has_tensor("attn_q.bias"),
        "qk_layernorm": keys.has_tensor("attn_q_norm.weight"),
    }


def _gemma(reader: ConfigReader) -> Values:
    """Gemma 1 and CodeGemma."""
    return {
        **reader.base("GemmaForCausalLM", "gemma"),
        **reader.rms(),
        **reader.dense(),
        **reader.rope(),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _internlm2(reader: ConfigReader) -> Values:
    """InternLM 2, whose file has the names and the order of Llama's."""
    return reader.usual("LlamaForCausalLM", "llama")


def _exaone(reader: ConfigReader) -> Values:
    return reader.usual("ExaoneForCausalLM", "exaone")


def _nemotron(reader: ConfigReader) -> Values:
    """Nemotron 4 and Minitron."""
    keys = reader.keys
    return {
        **reader.base("NemotronForCausalLM", "nemotron"),
        **reader.dense(),
        **_partial_rope(reader),
        "norm_eps": keys.require("attention.layer_norm_epsilon"),
        **reader.attention_bias(),
        "mlp_bias": keys.has_tensor("ffn_up.bias"),
    }


def _chatglm(reader: ConfigReader) -> Values:
    """GLM-4 9B and GLM-Edge."""
    keys = reader.keys
    return {
        **reader.base("GlmForCausalLM", "glm"),
        **reader.rms(),
        **reader.dense(),
        **_partial_rope(reader),
        "attention_bias": keys.has_tensor("attn_q.bias") or keys.has_tensor("attn_qkv.bias"),
    }


def _classic(reader: ConfigReader, architecture: str, model_type: str) -> Values:
    """The keys of families with layer norms whose heads all have a size that follows from others."""
    values = {**reader.base(architecture, model_type), **reader.dense()}
    del values["head_dim"], values["num_key_value_heads"]
    return {**values, "layer_norm_eps": reader.keys.require("attention.layer_norm_epsilon")}


def _partial_rope(reader: ConfigReader) -> Values:
    """Returns the rope of families that usually rotate a part of a head, also where all of it is rotated."""
    return {"partial_rotary_factor": 1.0, **reader.rope()}


CLASSICS: Mapping[str, Callable[[ConfigReader], Values]] = {
    "gpt2": _gpt2,
    "starcoder": _starcoder,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
    "phi2": _phi2,
    "stablelm": _stablelm,
    "gemma": _gemma,
    "internlm2": _internlm2,
    "exaone": _exaone,
    "nemotron": _nemotron,
    "chatglm": _chatglm,
}
"""Readers by `general.architecture`."""
