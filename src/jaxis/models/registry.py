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
    "AfmoeForCausalLM": "jaxis.models.afmoe:AfmoeForCausalLM",
    "ApertusForCausalLM": "jaxis.models.apertus:ApertusForCausalLM",
    "BailingHybridForCausalLM": "jaxis.models.bailing_hybrid:BailingHybridForCausalLM",
    "BambaForCausalLM": "jaxis.models.bamba:BambaForCausalLM",
    "Cohere2ForCausalLM": "jaxis.models.cohere2:Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM": "jaxis.models.cohere2_moe:Cohere2MoeForCausalLM",
    "CohereForCausalLM": "jaxis.models.cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": "jaxis.models.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM": "jaxis.models.deepseek_v32:DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM": "jaxis.models.deepseek_v3:DeepseekV3ForCausalLM",
    "Dots1ForCausalLM": "jaxis.models.dots1:Dots1ForCausalLM",
    "Ernie4_5ForCausalLM": "jaxis.models.ernie4_5:Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "jaxis.models.ernie4_5_moe:Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM": "jaxis.models.exaone4:Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM": "jaxis.models.exaone_moe:ExaoneMoeForCausalLM",
    "FalconH1ForCausalLM": "jaxis.models.falcon_h1:FalconH1ForCausalLM",
    "FalconMambaForCausalLM": "jaxis.models.mamba:FalconMambaForCausalLM",
    "Gemma2ForCausalLM": "jaxis.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "jaxis.models.gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "jaxis.models.gemma3:Gemma3ForConditionalGeneration",
    "Gemma3nForCausalLM": "jaxis.models.gemma3n:Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration": "jaxis.models.gemma3n:Gemma3nForConditionalGeneration",
    "Gemma4ForCausalLM": "jaxis.models.gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "jaxis.models.gemma4:Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM": "jaxis.models.gemma4:Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "jaxis.models.gemma4:Gemma4UnifiedForConditionalGeneration",
    "Glm4ForCausalLM": "jaxis.models.glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "jaxis.models.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "jaxis.models.glm4_moe_lite:Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM": "jaxis.models.glm_moe_dsa:GlmMoeDsaForCausalLM",
    "GptOssForCausalLM": "jaxis.models.gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "jaxis.models.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "jaxis.models.granitemoe:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": "jaxis.models.granitemoehybrid:GraniteMoeHybridForCausalLM",
    "GraniteSWAForCausalLM": "jaxis.models.granite:GraniteSWAForCausalLM",
    "HYV3ForCausalLM": "jaxis.models.hy_v3:HYV3ForCausalLM",
    "HunYuanDenseV1ForCausalLM": "jaxis.models.hunyuan_v1_dense:HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM": "jaxis.models.hunyuan_v1_moe:HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM": "jaxis.models.jamba:JambaForCausalLM",
    "KimiLinearForCausalLM": "jaxis.models.kimi_linear:KimiLinearForCausalLM",
    "Kimi_K25ForConditionalGeneration": "jaxis.models.deepseek_v3:Kimi_K25ForConditionalGeneration",
    "LagunaForCausalLM": "jaxis.models.laguna:LagunaForCausalLM",
    "Lfm2ForCausalLM": "jaxis.models.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "jaxis.models.lfm2_moe:Lfm2MoeForCausalLM",
    "Llama4ForCausalLM": "jaxis.models.llama4:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": "jaxis.models.llama4:Llama4ForConditionalGeneration",
    "LlamaForCausalLM": "jaxis.models.llama:LlamaForCausalLM",
    "Mamba2ForCausalLM": "jaxis.models.mamba2:Mamba2ForCausalLM",
    "MambaForCausalLM": "jaxis.models.mamba:MambaForCausalLM",
    "MellumForCausalLM": "jaxis.models.mellum:MellumForCausalLM",
    "MiMoForCausalLM": "jaxis.models.qwen2:MiMoForCausalLM",
    "MiMoV2FlashForCausalLM": "jaxis.models.mimo_v2_flash:MiMoV2FlashForCausalLM",
    "MiniMaxM2ForCausalLM": "jaxis.models.minimax_m2:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "jaxis.models.mistral3:Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration": "jaxis.models.mistral3:Mistral3ForConditionalGeneration",
    "Mistral4ForCausalLM": "jaxis.models.mistral4:Mistral4ForCausalLM",
    "MistralForCausalLM": "jaxis.models.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "jaxis.models.mixtral:MixtralForCausalLM",
    "MuseGlimmerForConditionalGeneration": "jaxis.models.muse_glimmer:MuseGlimmerForConditionalGeneration",
    "NemotronHForCausalLM": "jaxis.models.nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "jaxis.models.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "jaxis.models.olmo3:Olmo3ForCausalLM",
    "OlmoHybridForCausalLM": "jaxis.models.olmo_hybrid:OlmoHybridForCausalLM",
    "OlmoeForCausalLM": "jaxis.models.olmoe:OlmoeForCausalLM",
    "Phi3ForCausalLM": "jaxis.models.phi3:Phi3ForCausalLM",
    "PhimoeForCausalLM": "jaxis.models.phimoe:PhimoeForCausalLM",
    "Qwen2ForCausalLM": "jaxis.models.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "jaxis.models.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "jaxis.models.qwen2:Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM": "jaxis.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "jaxis.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "jaxis.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration": "jaxis.models.qwen3:Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": "jaxis.models.qwen3_moe:Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForCausalLM": "jaxis.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "jaxis.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "jaxis.models.qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "jaxis.models.qwen3_5_moe:Qwen3_5MoeForConditionalGeneration",
    "SeedOssForCausalLM": "jaxis.models.seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "jaxis.models.smollm3:SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM": "jaxis.models.starcoder2:Starcoder2ForCausalLM",
    "Step3p5ForCausalLM": "jaxis.models.step3p5:Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration": "jaxis.models.step3p5:Step3p7ForConditionalGeneration",
}
# Other names that checkpoints of a built-in architecture have -> its name.
_OTHER_NAMES: dict[str, str] = {
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
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
    return sorted(
        {*_BUILT_IN, *_OTHER_NAMES, *_registered, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}
    )


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
        model = _registered.get(architecture) or plugins.get(architecture)
        if model is not None:
            return architecture, model
        name = _OTHER_NAMES.get(architecture, architecture)
        if name in _BUILT_IN:
            return name, _BUILT_IN[name]
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
