"""Finds out how jaxis uses each key of a config.json by constructing the family abstractly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.architecture import architectures_of
from jaxis.config.checkpoint_values import checkpoint_dtype
from jaxis.config.hf_config import HFConfig, KeyUse
from jaxis.config.quantization import QuantizationConfig
from jaxis.engine.engine_config import DEFAULT_DTYPE, DTYPES
from jaxis.errors import ConfigError
from jaxis.layers.module import JaxModule
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.registry import is_supported
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.rules import RuleQuantizationConfig

MAX_REFUSALS = 10
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Construction:
    """The result of constructing the model's family without weights.

    Attributes:
      model: The model with shapes and types for parameters; None if the family is missing or refuses the config.
      refusals: Reasons why it cannot be constructed as configured, one line each.
    """

    model: JaxModule | None
    vllm_config: VllmConfig | None
    uses: tuple[KeyUse, ...]
    refusals: tuple[str, ...] = ()
    refused_keys: frozenset[str] = field(default_factory=frozenset)
    is_known: bool = True


def construct(
    values: dict[str, Any],
    source: str,
    rules: RuleQuantizationConfig | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> Construction:
    """Constructs the family abstractly; removes a refused key and tries again, to find all of them.

    `source` names the values for error messages. `rules` quantize an unquantized checkpoint.
    """
    config = HFConfig(values, source=source)
    try:
        is_known = is_supported(architectures_of(config))
    except ConfigError:  # names none
        is_known = False
    if not is_known:
        config.get("text_config")  # so that its keys are reported one by one
        return Construction(None, None, tuple(config.key_uses()), is_known=False)
    refusals: list[str] = []
    refused: dict[str, None] = {}
    while True:
        config = HFConfig(values, refused, source=source)
        try:
            model, vllm_config = _construct(config, source, rules, tensors, refusals, refused)
        except ConfigError as error:
            if refused.keys() & error.keys or (refused and isinstance(error, KeyError)):  # lacks what was removed
                break
            refusals.append(_one_line(error))
            # A layer does not know which object its keys are in.
            endings = tuple(f".{key}" for key in error.keys)
            present = [use.key for use in config.key_uses() if use.value is not None]
            named = [key for key in present if f".{key}".endswith(endings)]
            refused |= dict.fromkeys(named)
            if not named or len(refusals) == MAX_REFUSALS:
                break
        except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
            refusals.append(f"the family cannot be constructed: {type(error).__name__}: {_one_line(error)}")
            break
        else:
            if set(refused) - {"quantization_config"}:
                break
            return Construction(model, vllm_config, tuple(config.key_uses()), tuple(refusals), frozenset(refused))
    return Construction(None, None, tuple(config.key_uses()), tuple(refusals), frozenset(refused))


def construct_once(values: Mapping[str, Any]) -> tuple[JaxModule, list[str]]:
    """Constructs the family abstractly; returns the model and the keys that it does not know.

    Raises ConfigError if it refuses the config.
    """
    config = HFConfig(values)
    model, _ = _construct(config, config.source, None, None, [], {})
    return model, config.unread_keys()


def _construct(
    config: HFConfig,
    source: str,
    rules: RuleQuantizationConfig | None,
    tensors: Mapping[str, TensorInfo] | None,
    refusals: list[str],
    refused: dict[str, None],
) -> tuple[JaxModule, VllmConfig]:
    quant_config: QuantizationConfig | None = None
    try:
        quant_config = quantization_of_checkpoint(config, rules, tensors)
    except ConfigError as error:
        # Everything else about the model can still be reported.
        refusals.append(_one_line(error))
        refused["quantization_config"] = None
    dtype = checkpoint_dtype(config) or DEFAULT_DTYPE
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} in config.json is not supported; known: {', '.join(DTYPES)}")
    vllm_config = VllmConfig(
        ModelConfig(
            source,
            config,
            dtype=DTYPES[dtype],
            max_model_len=config.get("max_position_embeddings", _DEFAULT_CONTEXT),
        ),
        quant_config=quant_config,
    )
    model = construct_abstractly(vllm_config, check_config=False)
    if quant_config is not None:
        quant_config.check_all_used()
    return model, vllm_config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
