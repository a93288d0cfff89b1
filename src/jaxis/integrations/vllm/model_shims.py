"""Classes for jaxis' models in vLLM's registries: one for each architecture and each quantization method.

A model's class only tells vLLM whether the model takes images beside text. A quantization class tells nothing about the
checkpoint. vLLM never asks them for a layer or a weight.
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
    """Model with the methods by which vLLM recognizes text generation from token ids."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        raise NotImplementedError(f"jaxis' worker has the model of {vllm_config.model_config.model}{prefix}, not torch")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@MULTIMODAL_REGISTRY.register_processor(JaxisImages, info=ImageInfo, dummy_inputs=DummyImages)
class JaxisImageModel(JaxisModel):
    """Model with the attributes by which vLLM recognizes image inputs. A checkpoint may still take text only."""

    supports_multimodal = True
    supports_multimodal_raw_input_only = False

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Returns None: chat templates place images."""
        del modality, i


class JaxisQuantization(QuantizationConfig):
    """Passes a quantized checkpoint through vLLM's configuration. jaxis reads the format in config.json."""

    def get_name(self) -> Any:
        return "jaxis"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:  # noqa: ARG003
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        """Does nothing: vLLM never calls it."""


@functools.cache
def register_models() -> None:
    """Registers jaxis' architectures in place of vLLM's models of the same names, and the quantization methods."""
    for method in {*QUANTIZATION_METHODS, *QUANT_METHODS}:
        register_quantization_config(method)(JaxisQuantization)
    for architecture in declared_architectures():
        base = JaxisImageModel if may_take_images(architecture) else JaxisModel
        ModelRegistry.register_model(architecture, type(architecture, (base,), {}))


def may_take_images(architecture: str) -> bool:
    """Returns whether checkpoints of this architecture may have an image encoder. Their files decide."""
    return architecture.endswith("ForConditionalGeneration")
