"""Constructs a config.json's family abstractly, and finds all that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.bringup.analyze.finding import ModelFinding
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.architecture import architectures_of
from jaxis.config.checkpoint_values import DEFAULT_CONTEXT_LENGTH, checkpoint_dtype
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
_QUANTIZATION = "quantization_config"


@dataclass(frozen=True)
class Construction:
    """The result of constructing the model's family without weights.

    Attributes:
      model: The model with shapes and types for parameters; None if the family is missing or refuses the config.
      uses: Uses of the keys, as far as the construction went.
      findings: Reasons why it cannot be constructed as configured. If it refuses the quantization alone, `model` is
        without.
    """

    model: JaxModule | None
    vllm_config: VllmConfig | None
    uses: tuple[KeyUse, ...]
    findings: tuple[ModelFinding, ...] = ()

    def checked(self, cannot: str) -> tuple[JaxModule, VllmConfig]:
        """Returns the model and its configuration. Raises ConfigError, which begins with `cannot`, with findings."""
        if self.model is None or self.vllm_config is None or self.findings:
            raise ConfigError(f"{cannot}: {self.findings[0].sentence}; jaxis analyze says more")
        return self.model, self.vllm_config


def construct(
    values: Mapping[str, Any],
    source: str,
    rules: RuleQuantizationConfig | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> Construction:
    """Constructs the family abstractly; removes a refused key and tries again, to find all of them.

    `source` names the values for error messages. `rules` quantize an unquantized checkpoint.
    """
    config = HFConfig(values, source=source)
    if (missing := _missing_family(config)) is not None:
        config.get("text_config")  # so that its keys are reported one by one
        return Construction(None, None, tuple(config.key_uses()), (missing,))
    findings: list[ModelFinding] = []
    refused: dict[str, None] = {}
    while True:
        config = HFConfig(values, refused, source=source)
        try:
            quant_config = None
            try:
                quant_config = quantization_of_checkpoint(config, rules, tensors)
            except ConfigError as error:
                # Everything else about the model can still be reported.
                findings.append(ModelFinding("refused", (_QUANTIZATION,), _one_line(error)))
                refused[_QUANTIZATION] = None
            model, vllm_config = _construct(config, source, quant_config)
        except ConfigError as error:
            if refused.keys() & error.keys or (refused and isinstance(error, KeyError)):  # lacks what was removed
                break
            # A layer does not know which object its keys are in.
            endings = tuple(f".{key}" for key in error.keys)
            present = [use.key for use in config.key_uses() if use.value is not None]
            named = tuple(key for key in present if f".{key}".endswith(endings))
            findings.append(ModelFinding("refused", named, _one_line(error)))
            refused |= dict.fromkeys(named)
            if not named or len(findings) == MAX_REFUSALS:
                break
        except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
            words = f"the family cannot be constructed: {type(error).__name__}: {_one_line(error)}"
            findings.append(ModelFinding("refused", (), words))
            break
        else:
            if set(refused) - {_QUANTIZATION}:
                break
            return Construction(model, vllm_config, tuple(config.key_uses()), tuple(findings))
    return Construction(None, None, tuple(config.key_uses()), tuple(findings))


def _missing_family(config: HFConfig) -> ModelFinding | None:
    try:
        architectures = architectures_of(config)
    except ConfigError as error:
        return ModelFinding("no_family", (), _one_line(error))
    if is_supported(architectures):
        return None
    return ModelFinding("no_family", tuple(architectures), f"jaxis has no family of {', '.join(architectures)}")


def _construct(config: HFConfig, source: str, quant_config: QuantizationConfig | None) -> tuple[JaxModule, VllmConfig]:
    dtype = checkpoint_dtype(config) or DEFAULT_DTYPE
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} in config.json is not supported; known: {', '.join(DTYPES)}")
    length = config.get("max_position_embeddings", DEFAULT_CONTEXT_LENGTH)
    model_config = ModelConfig(source, config, dtype=DTYPES[dtype], max_model_len=length)
    vllm_config = VllmConfig(model_config, quant_config=quant_config)
    model = construct_abstractly(vllm_config, check_config=False)
    if quant_config is not None:
        quant_config.check_all_used()
    return model, vllm_config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
