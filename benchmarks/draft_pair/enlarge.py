"""Makes a trained pair as large as models that people use, without changing what it computes.

Features that are added are 0, and so is what layers that are added add. Only the epsilons of norms weigh otherwise.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_NORMS = {"input_layernorm", "post_attention_layernorm", "hidden_norm", "enorm", "hnorm", "norm"}
_READ_STATES = {"embed_tokens", "lm_head", "gate", "eh_proj", "fc"}
_READ_STATES |= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_GIVE_STATES = {"o_proj", "down_proj", "eh_proj", "fc"}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Sizes:
    """Of the larger model; the defaults are about Qwen3-0.6B's.

    Attributes:
      hidden_size: E.
      intermediate_size: Of dense feed-forwards, and of those of the EAGLE-3 head.
      moe_intermediate_size: Of each expert.
      num_idle_layers: Layers that add 0, before the others.
    """

    hidden_size: int = 1024
    intermediate_size: int = 3072
    moe_intermediate_size: int = 1024
    num_idle_layers: int = 24


def enlarge_model(folder: Path, larger: Path, sizes: Sizes) -> None:
    """Saves a larger copy of FOLDER/config.json and its tensors, in bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    num_idle, tensors = sizes.num_idle_layers, {}
    torch.manual_seed(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        large = _enlarged(name, tensor, config["hidden_size"], sizes)
        found = _LAYER.match(name)
        if found is None:
            tensors[name] = large
            continue
        number, rest = int(found[1]), name[found.end() :]
        tensors[f"model.layers.{number + num_idle}.{rest}"] = large
        for idle in range(num_idle if number == 0 else 0):
            adds = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            tensors[f"model.layers.{idle}.{rest}"] = torch.zeros_like(large) if adds else torch.randn_like(large) / 32
    config |= {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "num_hidden_layers": config["num_hidden_layers"] + num_idle,
        "first_k_dense_replace": config["first_k_dense_replace"] + num_idle,
    }
    _save(larger, config, tensors)


def enlarge_eagle3(folder: Path, larger: Path, sizes: Sizes) -> None:
    """The same of an EAGLE-3 head."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: _enlarged(name, tensor, config["hidden_size"], sizes) for name, tensor in tensors.items()}
    config |= {"hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size}
    layer_ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + sizes.num_idle_layers for i in layer_ids]
    _save(larger, config, tensors)


def _enlarged(name: str, tensor: torch.Tensor, hidden_size: int, sizes: Sizes) -> torch.Tensor:
    """A tensor with zeros for all that is added."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf in _NORMS:
        # The mean of squares is taken over more features, so that they get larger by this.
        scale = math.sqrt(hidden_size / sizes.hidden_size)
        return _padded(tensor[None] * scale, 1, 1, sizes.hidden_size)[0]
    if tensor.dim() != 2:
        return tensor
    (rows, columns), num_blocks = tensor.shape, 1
    width = sizes.moe_intermediate_size if "experts." in name else sizes.intermediate_size
    if leaf in _READ_STATES:  # of one state, or of several side by side
        num_blocks, columns = columns // hidden_size, sizes.hidden_size
    if leaf in _GIVE_STATES:
        rows = sizes.hidden_size
    if leaf in ("gate_proj", "up_proj"):
        rows = width
    if leaf == "down_proj":
        columns = width
    return _padded(tensor, rows, num_blocks, columns)


def _padded(tensor: torch.Tensor, rows: int, num_blocks: int, columns: int) -> torch.Tensor:
    """[r, num_blocks * c] -> [rows, num_blocks * columns]; each block is padded on its own."""
    blocks = tensor.unflatten(1, (num_blocks, -1))
    larger = torch.zeros(rows, num_blocks, columns)
    larger[: blocks.shape[0], :, : blocks.shape[2]] = blocks
    return larger.flatten(1)


def _save(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
    low_precision = {name: t.bfloat16().contiguous() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(low_precision, folder / "model.safetensors", {"format": "pt"})
