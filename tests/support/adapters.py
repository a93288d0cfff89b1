"""Adapters that PEFT makes over tiny checkpoints, with random weights: the zeros of untrained ones prove nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def base_model(folder: Path) -> Any:
    """The checkpoint in transformers, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapter(base: Path, folder: Path, *, seed: int = 0, scale: float = 0.3, **config: Any) -> Path:
    """Saves an adapter of a checkpoint.

    Args:
      base: The checkpoint.
      folder: Place of the adapter.
      seed: Seed of its weights.
      scale: Their standard deviation.
      config: Fields of `peft.LoraConfig`.
    """
    config = {"target_modules": ALL_LINEAR, "r": 4, "lora_alpha": 8, **config}
    adapted = peft.get_peft_model(base_model(base), peft.LoraConfig(**config))
    randomize(adapted, seed=seed, scale=scale)
    adapted.save_pretrained(folder)
    return folder


def randomize(adapted: Any, *, seed: int = 0, scale: float = 0.3) -> None:
    """Gives what an adapter has of PEFT's model random weights.

    Args:
      adapted: The model.
      seed: Seed of the weights.
      scale: Their standard deviation.
    """
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                noise = scale * torch.randn(parameter.shape, generator=rng)
                is_whole = "lora_" not in name or "magnitude" in name
                parameter.copy_(parameter + 0.1 * noise if is_whole else noise)


def reference_logits(base: Path, adapter: Path, token_ids: list[int]) -> np.ndarray:
    """PEFT's logits of each token, the adapter beside the weights."""
    model = peft.PeftModel.from_pretrained(base_model(base), str(adapter)).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def edit_config(adapter: Path, **changes: Any) -> None:
    """Sets keys of an adapter's config."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
