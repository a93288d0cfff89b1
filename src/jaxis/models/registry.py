"""The model class for each `architectures` entry of config.json."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from jaxis.config.architecture import architectures_of, check_model_type
from jaxis.config.hf_config import HFConfig
from jaxis.config.value_checks import check_values
from jaxis.errors import ConfigError

ENTRY_POINT_GROUP = "jaxis.models"

# Imported on demand. Add a family here: architecture name -> "module:Class".
_BUILT_IN: dict[str, str] = {
    "Cohere2ForCausalLM": "jaxis.models.cohere2:Cohere2ForCausalLM",
    "CohereForCausalLM": "jaxis.models.cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": "jaxis.models.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "jaxis.models.deepseek_v3:DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM": "jaxis.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "jaxis.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "jaxis.models.gemma3:Gemma3ForConditionalGeneration",
    "Glm4ForCausalLM": "jaxis.models.glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "jaxis.models.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "jaxis.models.glm4_moe_lite:Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM": "jaxis.models.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "jaxis.models.granite:GraniteForCausalLM",
    "Llama4ForCausalLM": "jaxis.models.llama4:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": "jaxis.models.llama4:Llama4ForConditionalGeneration",
    "LlamaForCausalLM": "jaxis.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "jaxis.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "jaxis.models.mixtral:MixtralForCausalLM",
    "Olmo2ForCausalLM": "jaxis.models.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "jaxis.models.olmo3:Olmo3ForCausalLM",
    "Phi3ForCausalLM": "jaxis.models.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "jaxis.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "jaxis.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "jaxis.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Starcoder2ForCausalLM": "jaxis.models.starcoder2:Starcoder2ForCausalLM",
}
_registered: dict[str, type[Any] | str] = {}


def register_model(architecture: str, model: type[Any] | str) -> None:
    """Registers a model class under the name that checkpoints have in config.json's `architectures`.

    Args:
      architecture: For example "MyModelForCausalLM". Overrides a built-in model of the same name.
      model: The class, or "package.module:Class" to import it when it is first needed.
    """
    if isinstance(model, str) and ":" not in model:
        raise ConfigError(f"register_model({architecture!r}, {model!r}): write it as 'package.module:Class'")
    _registered[architecture] = model


def built_in_models() -> dict[str, str]:
    """The built-in models: architecture -> "module:Class"."""
    return dict(_BUILT_IN)


def supported_architectures() -> list[str]:
    """Every name that `get_model_class` knows, plug-ins included."""
    return sorted({*_BUILT_IN, *_registered, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def get_model_class(architectures: list[str]) -> type[Any]:
    """The class for the first known name: registered classes come first, then plug-ins, then built-in models.

    Raises:
      ConfigError: No name is known, or a plug-in's module cannot be imported.
    """
    return _import_class(*_find(architectures))


def model_class_of(hf_config: HFConfig) -> type[Any]:
    """The class for config.json's `architectures`; see `get_model_class`.

    Raises:
      ConfigError: As there; also, the model is a built-in one, and config.json's `model_type` is another's, or one of
        its sizes cannot be one.
    """
    architecture, model = _find(architectures_of(hf_config))
    if model == _BUILT_IN.get(architecture):
        check_model_type(hf_config, architecture)
        check_values(hf_config)
    return _import_class(architecture, model)


def _find(architectures: list[str]) -> tuple[str, type[Any] | str]:
    """The first known name, and its model: a class, or the path of one."""
    plugins = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    for architecture in architectures:
        model = _registered.get(architecture) or plugins.get(architecture) or _BUILT_IN.get(architecture)
        if model is not None:
            return architecture, model
    raise ConfigError(
        f"architectures={architectures} in config.json is not supported; supported: "
        f"{', '.join(supported_architectures())}. docs/adding-a-model.md shows how to add one."
    )


def _import_class(architecture: str, model: type[Any] | str) -> type[Any]:
    if not isinstance(model, str):
        return model
    module, _, name = model.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the model class {model!r} registered for {architecture} cannot be imported: {error}"
        ) from error
