"""What vLLM's model registry has for each architecture of jaxis: a class that says "text" and is never constructed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.models import ModelRegistry

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


@functools.cache
def register_models() -> None:
    """Registers each architecture that jaxis has, in place of vLLM's own model of that name."""
    for architecture in declared_architectures():
        ModelRegistry.register_model(architecture, type(architecture, (JaxisModel,), {}))
