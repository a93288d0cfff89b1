"""Mistral's `params.json`, read as the config.json of the same model.

Makers who publish in this format have it in place of config.json, beside `consolidated*.safetensors`. The text model is
read: a `vision_encoder` is left out, as its tensors are.
Source: vLLM's transformers_utils/configs/mistral.py; transformers' conversions of Ministral 3 and Mistral 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import ConfigError
from jaxis.host.json_object import read_json_object

PARAMS = "params.json"
# Default of a file without the key: the value of every model of this format since the first.
_DEFAULT_MAX_POSITIONS = 32768

# Mistral's key -> config.json's.
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}
# Values that the models of this format have, and the only ones that are read.
_EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "activation": ("silu",),
    "causal": (True,),
    "model_type": ("transformer",),
    "use_biases": (False,),
}
_EXPECTED_OF_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "num_expert_groups": (1,),
    "num_expert_groups_per_tok": (1,),
    "renorm_strategy": ("WEIGHTS",),
    "route_every_n": (1,),
    "use_load_balancing_bias": (False,),
}
# Keys about training, and about parts that are left out.
_UNUSED = {"max_batch_size", "vision_encoder", "dtype"}
_UNUSED_OF_EXPERTS = {"expert_parallel", "expert_model_parallel"}


def is_mistral_format(folder: Path) -> bool:
    """Returns whether a folder has a checkpoint in Mistral's own format, and none in Hugging Face's."""
    return not (folder / "config.json").exists() and (folder / PARAMS).exists()


def read_mistral_params(folder: Path) -> dict[str, Any]:
    """Returns the folder's params.json as the values of a config.json.

    Raises CheckpointError if the file is not a JSON object, and ConfigError if the file is Meta's, a key is missing, or
    one is unknown or has a value that is not supported.
    """
    params = _Params(read_json_object(folder / PARAMS), str(folder / PARAMS))
    if "multiple_of" in params.values:
        raise ConfigError(f"{params.source} is Meta's: give the folder of a checkpoint in Hugging Face format")
    params.expect(_EXPECTED)
    values = {
        **{key: params.take(own) for own, key in _SIZES.items()},
        # Without it, readers of the format take different ones.
        "rope_theta": float(params.take("rope_theta")),
        "tie_word_embeddings": params.take("tied_embeddings", False),
        **{"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2},
    }
    head_dim = params.take("head_dim", values["hidden_size"] // values["num_attention_heads"])
    rope = _rope(params, values["rope_theta"])
    longest, alternative = params.take("max_position_embeddings", None), params.take("max_seq_len", None)
    stretched = int(rope["factor"] * rope["original_max_position_embeddings"]) if rope else _DEFAULT_MAX_POSITIONS
    values["max_position_embeddings"] = longest or alternative or stretched
    experts = params.take("moe", None)
    windows = _windows(params, values["num_hidden_layers"])
    if (quantization := params.take("quantization", None)) is not None:
        values["quantization_config"] = _quantization(quantization, params.source)
    if params.values.get("qk_nope_head_dim"):
        if rope is None or "mscale" not in rope or windows or not experts:
            raise ConfigError(
                f"{params.source} has latent attention with windows, without experts, or without yarn of apply_scale "
                "false: no published model has; give a checkpoint in Hugging Face format"
            )
        values |= {key: params.take(key) for key in _LATENT_SIZES}
        values |= _experts_of_latent_model(experts, params.source)
        values |= {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "rope_parameters": rope}
    elif experts:
        inner = _Params(experts, f"moe in {params.source}")
        values |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "head_dim": head_dim,
            "num_local_experts": inner.take("num_experts"),
            "num_experts_per_tok": inner.take("num_experts_per_tok"),
            **_plain(rope, windows, params.source),
        }
        inner.check_all_taken(_UNUSED_OF_EXPERTS)
    elif rope:
        values |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": head_dim}
        values |= {"rope_parameters": rope, **_plain(None, windows, params.source)}
    elif "layer_types" in windows:
        values |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "head_dim": head_dim}
        values |= windows
    else:
        values |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": head_dim}
        values |= _plain(None, windows, params.source)
    params.check_all_taken(_UNUSED)
    return values


class _Params:
    """Values that are taken one by one, so that none is overlooked."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self._taken: set[str] = set()

    def take(self, key: str, *default: Any) -> Any:
        """Takes the value, or the `default` (if there is one) for a key that is missing or null."""
        self._taken.add(key)
        if (value := self.values.get(key)) is not None:
            return value
        if not default:
            raise ConfigError(f"{self.source} has no {key!r}, which the model needs: add it to the file")
        return default[0]

    def expect(self, expected: Mapping[str, tuple[Any, ...]]) -> None:
        """Takes keys that may be missing, or have one of some values."""
        for key, allowed in expected.items():
            if (value := self.take(key, allowed[0])) not in allowed:
                raise ConfigError(f"{self.source} has {key}={value!r}, and only {allowed[0]!r} is supported")

    def check_all_taken(self, unused: set[str]) -> None:
        others = sorted(k for k, v in self.values.items() if v is not None and k not in self._taken | unused)
        if others:
            raise ConfigError(
                f"{self.source} has keys that are not known ({', '.join(others)}): it is of a newer model, which needs "
                "a newer jaxis or the checkpoint in Hugging Face format"
            )


def _rope(params: _Params, theta: float) -> dict[str, Any] | None:
    """Returns the `rope_parameters` of yarn and of queries scaled by position; None for neither."""
    yarn, scaling = params.take("yarn", None), params.take("llama_4_scaling", None)
    if not yarn:
        if scaling:
            raise ConfigError(f"{params.source} has llama_4_scaling without yarn, which is not supported")
        return None
    inner = _Params(yarn, f"yarn in {params.source}")
    original = int(inner.take("original_max_position_embeddings"))
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(inner.take("factor")),
        "original_max_position_embeddings": original,
        "beta_fast": float(inner.take("beta", 32)),
        "beta_slow": float(inner.take("alpha", 1)),
    }
    if not inner.take("apply_scale", True):
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    inner.check_all_taken(set())
    if scaling:
        if scaling.get("original_max_position_embeddings") != original:
            raise ConfigError(
                f"{params.source}: yarn and llama_4_scaling have different original_max_position_embeddings"
            )
        rope["llama_4_scaling_beta"] = scaling["beta"]
    return rope


def _windows(params: _Params, num_layers: int) -> dict[str, Any]:
    """Returns `sliding_window`, and `layer_types` if the file lists windows, which repeat; nothing without windows."""
    window, listed = params.take("sliding_window", None), params.take("_sliding_window", None)
    window = listed if listed is not None else window
    if window is None:
        return {}
    if not isinstance(window, list):
        return {"sliding_window": int(window)}
    sizes = {size for size in window if size is not None}
    if len(sizes) != 1 or num_layers % len(window):
        raise ConfigError(
            f"{params.source} has sliding_window={window!r}, expected one size or null in each place, and a number of "
            f"places that divides its {num_layers} layers"
        )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in window]
    return {"sliding_window": int(sizes.pop()), "layer_types": kinds * (num_layers // len(window))}


def _plain(rope: dict[str, Any] | None, windows: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the `sliding_window` of a model with one window in all layers, or none; raises ConfigError for more."""
    if rope or "layer_types" in windows:
        raise ConfigError(f"{source} has experts or yarn beside yarn or windows of some layers, which is not supported")
    return {"sliding_window": None, **windows}


def _experts_of_latent_model(experts: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the keys of experts that a softmax chooses, whose weights are renormalized."""
    inner = _Params(experts, f"moe in {source}")
    inner.expect(_EXPECTED_OF_EXPERTS)
    found = {key: inner.take(own) for own, key in _EXPERTS.items()}
    inner.check_all_taken(_UNUSED_OF_EXPERTS)
    return {**found, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}


def _quantization(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the `quantization_config` of fp8 weights, or of weights that llm-compressor has quantized."""
    if str(values.get("quant_method", "")).lower().replace("_", "-") == "compressed-tensors":
        return {**values, "quant_method": "compressed-tensors"}
    if values.get("qformat_weight") != "fp8_e4m3" or values.get("qscheme_act") not in ("TENSOR", "NO_SCALES", None):
        raise ConfigError(f"{source} has quantization={dict(values)!r}, expected fp8_e4m3 or compressed-tensors")
    scheme = "dynamic" if values.get("qscheme_act") == "NO_SCALES" else "static"
    return {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": None}
