"""Configs of later relatives of Llama and OLMo without experts, from the keys of GGUF files.

Source: llama.cpp's `src/models/*.cpp` of these architectures, and its converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT


def _arcee(reader: ConfigReader) -> Values:
    """AFM-4.5B."""
    return {
        **reader.usual("ArceeForCausalLM", "arcee"),
        **reader.attention_bias(),
        "hidden_act": "relu2",
        "mlp_bias": reader.keys.has_tensor("ffn_up.bias"),
    }


def _ernie4_5(reader: ConfigReader) -> Values:
    return {
        **reader.usual("Ernie4_5ForCausalLM", "ernie4_5", theta=500_000.0),
        "use_bias": reader.keys.has_tensor("attn_output.bias"),
    }


def _exaone4(reader: ConfigReader) -> Values:
    """EXAONE 4; without windows, every layer has a rope."""
    values = {**reader.usual("Exaone4ForCausalLM", "exaone4", theta=1_000_000.0), "sliding_window": reader.window()}
    return values if values["sliding_window"] is None else {**values, "layer_types": reader.layer_types(full_every=4)}


def _hunyuan(reader: ConfigReader) -> Values:
    """Hunyuan 0.5B to 7B, whose file has the rope's base with alpha."""
    return {**reader.usual("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"), **reader.attention_bias()}


def _apertus(reader: ConfigReader) -> Values:
    """Apertus, whose activations' numbers the file has in keys: one of each layer."""
    keys = reader.keys
    for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ())):
        numbers = keys.metadata.get(f"xielu.{name}")
        if not isinstance(numbers, np.ndarray) or len(numbers) < reader.num_layers:
            raise ConfigError(f"{keys.source} lacks the key xielu.{name} with a number for each layer")
        for layer in range(reader.num_layers):
            number = np.asarray(numbers[layer], np.float32).reshape(shape)
            reader.small_tensors[f"model.layers.{layer}.mlp.act_fn.{name}"] = number
    return {**reader.usual("ApertusForCausalLM", "apertus"), **reader.attention_bias(), "hidden_act": "xielu"}


def _olmo(reader: ConfigReader) -> Values:
    """OLMo 1, whose norms have neither weights nor another epsilon."""
    keys = reader.keys
    keys.expect("attention.layer_norm_epsilon", 1e-5)
    values = {**reader.base("OlmoForCausalLM", "olmo"), **reader.dense(), **reader.rope()}
    return {**values, **reader.attention_bias(), "clip_qkv": keys.get("attention.clamp_kqv")}


def _minicpm(reader: ConfigReader) -> Values:
    """MiniCPM 1B and 2B, and MiniCPM4; older files lack the multipliers of the first two."""
    keys = reader.keys
    residual, logits = keys.get("residual_scale"), keys.get("logit_scale")
    values = reader.usual("MiniCPMForCausalLM", "minicpm")
    long, short = reader.read_tensor(ROPE_FACTORS_LONG), reader.read_tensor(ROPE_FACTORS_SHORT)
    if long is not None and short is not None:
        original = keys.get("rope.scaling.original_context_length", values["max_position_embeddings"])
        values["rope_scaling"] = {
            **{"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()},
            **{"attention_factor": 1.0, "original_max_position_embeddings": original},
        }
    return {
        **values,
        "scale_emb": keys.get_or_assume("embedding_scale", "scale_emb", 12.0),
        "scale_depth": keys.assume("scale_depth", 1.4) if residual is None else residual * reader.num_layers**0.5,
        "dim_model_base": keys.assume("dim_model_base", 256) if logits is None else reader.hidden_size / logits,
    }


LATER: Mapping[str, Callable[[ConfigReader], Values]] = {
    "arcee": _arcee,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "hunyuan-dense": _hunyuan,
    "apertus": _apertus,
    "olmo": _olmo,
    "minicpm": _minicpm,
}
"""Readers by `general.architecture`."""
