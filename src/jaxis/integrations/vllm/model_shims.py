"""What vLLM's registries have for models of jaxis: a class for each architecture, and one for each way to quantize.

A class says that the model takes text, or images, too; of how a checkpoint is quantized, it says nothing. None is ever
asked for a layer or a weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from jaxis.engine.vllm_arguments import QUANT_METHODS
from jaxis.integrations.vllm.images import DummyImages, ImageInfo, JaxisImages
from jaxis.models.registry import declared_architectures


class JaxisModel(torch.nn.Module):
    """Has the methods by which vLLM knows a model that generates text from token ids."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError(f"jaxis' worker has the model of {vllm_config.model_config.model}{prefix}, not torch")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Never called."""
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Never called."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Never called."""
        raise NotImplementedError


@MULTIMODAL_REGISTRY.register_processor(JaxisImages, info=ImageInfo, dummy_inputs=DummyImages)
class JaxisImageModel(JaxisModel):
    """Has the attributes by which vLLM knows a model that takes images, too; a checkpoint may have the text alone."""

    supports_multimodal = True
    supports_multimodal_raw_input_only = False

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """None: chat templates place images."""
        del modality, i


class JaxisQuantization(QuantizationConfig):
    """Lets a quantized checkpoint through vLLM's configuration. jaxis reads how it is quantized in its config.json."""

    def get_name(self) -> Any:
        """See `QuantizationConfig`."""
        return "jaxis"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """See `QuantizationConfig`."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """See `QuantizationConfig`."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """See `QuantizationConfig`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:  # noqa: ARG003
        """See `QuantizationConfig`."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        """Never called."""


@functools.cache
def register_models() -> None:
    """Registers each architecture that jaxis has, in place of vLLM's own model of that name, and ways to quantize."""
    for method in {*QUANTIZATION_METHODS, *QUANT_METHODS}:
        register_quantization_config(method)(JaxisQuantization)
    for architecture in declared_architectures():
        base = JaxisImageModel if may_take_images(architecture) else JaxisModel
        ModelRegistry.register_model(architecture, type(architecture, (base,), {}))


def may_take_images(architecture: str) -> bool:
    """Whether checkpoints of this name in `architectures` may have a vision tower; whether one has, its files say."""
    return architecture.endswith("ForConditionalGeneration")
