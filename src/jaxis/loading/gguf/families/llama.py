"""Llama, Mistral, Mixtral and families that are Llama but for a few settings."""

from __future__ import annotations

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, MLP_BIAS, WINDOW, experts, usual
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.table import GGUF, Fact, Written, constant, has, key
from jaxis.loading.gguf.tensor_names import NORMS_AFTER, W1_W3_W2, GGUFNames

_NAMES = GGUFNames(permutes_rope=True)
_BIASES = (has("attention_bias", "attn_q.bias", "attn_qkv.bias"), MLP_BIAS)


def _whole_heads(reader: ConfigReader) -> Values:
    if "partial_rotary_factor" in reader.values:
        keys = reader.keys
        raise ConfigError(f"{keys.source} rotates a part of each head, which {keys.architecture} files cannot have")
    return {}


_LLAMA = (usual(), Fact(_whole_heads))


def _has_window(reader: ConfigReader) -> bool:
    return bool(reader.keys.get("attention.sliding_window"))


def _grows(reader: ConfigReader) -> bool:
    return bool(reader.keys.get("attention.temperature_scale"))


def _growing_rope(reader: ConfigReader) -> Values:
    """Ministral 3's queries grow with their position."""
    mscale = reader.keys.get("rope.scaling.yarn_log_multiplier")
    beta = reader.keys.get("attention.temperature_scale") or None
    return {"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": beta}


def _check_yarn(reader: ConfigReader) -> Values:
    if "rope_scaling" not in reader.values:
        raise ConfigError(f"{reader.keys.source} has attention.temperature_scale without a YaRN rope: use another file")
    return {}


_MISTRAL3 = (usual(yarn=_growing_rope), WINDOW)


def _activations(reader: ConfigReader) -> Values:
    """Apertus' numbers of its activations, which the file has in keys: one of each layer."""
    keys = reader.keys
    for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ())):
        numbers = keys.metadata.get(f"xielu.{name}")
        if not isinstance(numbers, np.ndarray) or len(numbers) < reader.num_layers:
            raise ConfigError(f"{keys.source} lacks the key xielu.{name} with a number for each layer")
        for layer in range(reader.num_layers):
            number = np.asarray(numbers[layer], np.float32).reshape(shape)
            reader.small_tensors[f"model.layers.{layer}.mlp.act_fn.{name}"] = number
    return {"hidden_act": "xielu"}


def _exaone4_windows(reader: ConfigReader) -> Values:
    """Without windows, every layer has a rope."""
    window = reader.keys.get("attention.sliding_window") or None
    return {"sliding_window": window} | ({} if window is None else {"layer_types": reader.layer_types(full_every=4)})


def _stacks(values: Values) -> list[tuple[str, str]]:
    """HRM-Text's layers are the lower stack's, then the upper one's."""
    size = values["num_layers_per_stack"]
    return [(f".model.layers.{i}.", f".model.{'LH'[i // size]}_module.layers.{i % size}.") for i in range(2 * size)]


GGUFS = (
    GGUF(
        ("llama", "mixtral", "MixtralForCausalLM"),
        (_LLAMA, WINDOW, experts("num_local_experts")),
        GGUFNames(projections=W1_W3_W2, permutes_rope=True),
        when="expert_count",
        written=Written(biases=True),
    ),
    GGUF(
        ("llama", "mistral", "MistralForCausalLM"),
        (_LLAMA, WINDOW),
        _NAMES,
        when="attention.sliding_window",
        written=Written(biases=True),
    ),
    GGUF(("llama", "llama", "LlamaForCausalLM"), (_LLAMA, _BIASES), _NAMES, written=Written(biases=True)),
    GGUF(
        ("mistral3", "ministral3", "Ministral3ForCausalLM"),
        (_MISTRAL3, Fact(_check_yarn)),
        _NAMES,
        when="attention.temperature_scale",
    ),
    GGUF(("mistral3", "mistral", "MistralForCausalLM"), _MISTRAL3, _NAMES),
    GGUF(
        ("hrm_text", "hrm_text", "HrmTextForCausalLM"),
        (
            usual(),
            key("embedding_scale", "embedding_scale", 1.0, float),
            key("num_layers_per_stack", "hrm.layers_per_stack"),
            [key("H_cycles", "hrm.h_cycles"), key("L_cycles", "hrm.l_cycles")],
            key("prefix_lm", "hrm.prefix_lm", False, bool),
        ),
        GGUFNames(
            {
                **{f"attn_{part}": f"self_attn.qkv_proj[{i}]" for i, part in enumerate(("gate", "q", "k", "v"))},
                **{f"ffn_{part}": f"mlp.gate_up_proj[{i}]" for i, part in enumerate(("gate", "up"))},
            },
            top_level={"hrm.z_l_init": "model.z_L_init="},
            renames=((".self_attn.qkv_proj.", ".attn.gqkv_proj."), (".self_attn.", ".attn.")),
        ),
        more_renames=_stacks,
        without=("num_key_value_heads",),
    ),
    GGUF(("internlm2", "llama", "LlamaForCausalLM"), usual(), _NAMES),
    GGUF(
        ("smollm3", "smollm3", "SmolLM3ForCausalLM"),
        (usual(), _BIASES, constant("no_rope_layer_interval", 4, is_assumed=True)),
        _NAMES,
    ),
    GGUF(
        ("apertus", "apertus", "ApertusForCausalLM"),
        (usual(), ATTENTION_BIAS, Fact(_activations)),
    ),
    GGUF(("exaone", "exaone", "ExaoneForCausalLM"), usual()),
    GGUF(
        ("exaone4", "exaone4", "Exaone4ForCausalLM"),
        (usual(1_000_000.0), Fact(_exaone4_windows)),
        GGUFNames(NORMS_AFTER),
    ),
)
