"""Tiny checkpoints as published with several layers that predict later tokens, and what they draft.

The decoder layers, norms and heads are those of transformers, put together as in SGLang or, for Nemotron 3, vLLM.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.masking_utils import create_sliding_window_causal_mask

from tests.support.parity import Family, checkpoint_folder, reference_model
from tests.support.prediction_checkpoints import family

NUM_LAYERS = 3


@dataclass(frozen=True)
class ChainFormat:
    """Names of the layers in a family's checkpoints, and their input.

    Attributes:
      module: The beginning of a layer's names, of its number behind the model's own layers, and of the model's layers.
      norm: Its final norm, below that.
      renamed: Pieces of the names of its decoder layer that are other than in the model's layers.
      center: Mean of norms' weights.
      hands_on_normed: True if hidden states are handed on after final norms.
      chains_states: True if each layer reads the hidden states of the one before, else those of the model.
    """

    module: Callable[[int, int], str]
    norm: str
    renamed: tuple[str, str]
    center: float
    hands_on_normed: bool
    chains_states: bool


_STEP = ChainFormat(
    lambda place, num_layers: f"model.layers.{num_layers + place}.",
    "transformer.shared_head.norm",
    ("", ""),
    0.0,
    hands_on_normed=False,
    chains_states=True,
)
FORMATS = {
    "Step 3.5": _STEP,
    "Step 5": _STEP,
    "MiMo V2 Flash": ChainFormat(
        lambda place, _: f"model.mtp.layers.{place}.",
        "final_layernorm",
        ("post_attention_layernorm", "pre_mlp_layernorm"),
        1.0,
        hands_on_normed=True,
        chains_states=False,
    ),
}


def write_chain_checkpoint(folder: Path, name: str, **settings: Any) -> Path:
    """Saves a family's model, with layers behind its own that predict later tokens.

    Args:
      folder: Place to write to.
      name: A key of `FORMATS`.
      settings: Keys of config.json.
    """
    larger, form = _larger(name, **settings), FORMATS[name]
    saved = Path(checkpoint_folder(larger))
    config, tensors = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    num_layers, size = config["num_hidden_layers"] - NUM_LAYERS, config["hidden_size"]
    rng = np.random.default_rng(0)
    for place in range(NUM_LAYERS):
        last, module = f"model.layers.{num_layers + place}.", form.module(place, num_layers)
        tensors = {_moved(key, last, module, form.renamed): tensor for key, tensor in tensors.items()}
        for part in ("enorm", "hnorm", form.norm):
            tensors[f"{module}{part}.weight"] = (form.center + 0.2 * rng.standard_normal(size)).astype(np.float32)
        projection = 0.2 * rng.standard_normal((size, 2 * size))
        tensors[f"{module}eh_proj.weight"] = projection.astype(np.float32)
        if form is _STEP:
            tensors[f"{module}transformer.shared_head.output.weight"] = tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config["num_hidden_layers"] = num_layers
    kinds = config.pop("mlp_layer_types")[:num_layers]
    if form is _STEP:  # whose lists have entries for these layers, too
        del config["per_layer_config"]
        config["moe_layers_enum"] = ",".join(str(i) for i, kind in enumerate(kinds) if kind == "sparse")
        config["num_nextn_predict_layers"] = NUM_LAYERS
    else:
        config |= {"mlp_layer_types": kinds, "layer_types": config["layer_types"][:num_layers]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _moved(name: str, last: str, module: str, renamed: tuple[str, str]) -> str:
    return f"{module}{name.removeprefix(last).replace(*renamed)}" if name.startswith(last) else name


def _larger(name: str, **settings: Any) -> Family:
    """The family with layers behind its own as those that predict are: dense, and with windows."""
    row = family(name, **settings)
    config = dict(row.config)
    for key, more in (
        *(("layer_types", "sliding_attention"), ("mlp_layer_types", "dense")),
        *(("swiglu_limits", 0), ("swiglu_limits_shared", 0)),
    ):
        if key in config:
            config[key] = [*config[key], *[more] * NUM_LAYERS]
    config["num_hidden_layers"] += NUM_LAYERS
    return dataclasses.replace(row, name=f"{row.name}, and more", config=config)


@torch.no_grad()
def chain_reference(
    folder: Path, name: str, tokens: Sequence[int], **settings: Any
) -> tuple[list[int], list[np.ndarray]]:
    """Drafts by transformers, as `prediction_checkpoints.reference_drafts` has them."""
    form, whole = FORMATS[name], reference_model(_larger(name, **settings))
    model, num_rows = _text_model(whole), len(tokens) - 1
    tensors, num_layers = load_file(folder / "model.safetensors"), len(model.layers) - NUM_LAYERS
    positions = torch.arange(num_rows)[None]
    first = whole(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[num_layers]
    first = states = model.norm(first) if form.hands_on_normed else first
    drafts, logits = [], []
    for place in range(NUM_LAYERS):
        module = form.module(place, num_layers)

        def part(which: str, module: str = module) -> torch.Tensor:
            return torch.from_numpy(tensors[f"{module}{which}.weight"])

        def norm(which: str, x: torch.Tensor) -> torch.Tensor:
            made = copy.deepcopy(model.norm)
            made.weight.data = part(which)
            return made(x)

        read = torch.tensor([[*tokens, *drafts][place + 1 : place + 1 + num_rows]])
        given = states if form.chains_states else first
        joined = torch.cat([norm("enorm", model.embed_tokens(read)), norm("hnorm", given)], dim=-1) @ part("eh_proj").T
        mask = create_sliding_window_causal_mask(model.config, joined, None, None, position_ids=positions)
        ropes = model.rotary_emb(joined, positions, "sliding_attention")
        block = model.layers[num_layers + place]
        states = block(joined, attention_mask=mask, position_embeddings=ropes, position_ids=positions)
        normed = norm(form.norm, states)
        logits.append(whole.lm_head(normed)[0, -1].numpy())
        drafts.append(int(logits[-1].argmax()))
        states = normed if form.hands_on_normed else states
    return drafts, logits


def _text_model(whole: transformers.PreTrainedModel) -> Any:
    return getattr(whole.model, "language_model", whole.model)


NEMOTRON_KINDS = ("attention", "moe")


def write_nemotron_checkpoint(folder: Path) -> tuple[Path, Family]:
    """Saves Nemotron 3, with a block of two layers that predicts the token after the next one.

    Returns:
      The folder, and the model with these two layers behind its own.
    """
    row = family("Nemotron 3")
    kinds = [*row.config["layers_block_type"], *NEMOTRON_KINDS]
    larger = dataclasses.replace(row, name="Nemotron 3, and two", config={**row.config, "layers_block_type": kinds})
    saved = Path(checkpoint_folder(larger))
    config, tensors = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    num_layers, size = len(kinds) - 2, config["hidden_size"]
    for place in range(2):
        last, module = f"{_layers_name(tensors)}.{num_layers + place}.", f"mtp.layers.{place}."
        tensors = {_moved(key, last, module, ("", "")): tensor for key, tensor in tensors.items()}
    rng = np.random.default_rng(0)
    for part in ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm"):
        tensors[f"mtp.{part}.weight"] = (1.0 + 0.2 * rng.standard_normal(size)).astype(np.float32)
    tensors["mtp.layers.0.eh_proj.weight"] = (0.2 * rng.standard_normal((size, 2 * size))).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": num_layers, "layers_block_type": config["layers_block_type"][:num_layers]}
    config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    config.pop("mtp_layers_block_type", None)
    config.pop("hybrid_override_pattern", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, larger


@torch.no_grad()
def nemotron_reference(
    folder: Path, larger: Family, tokens: Sequence[int], num_drafts: int
) -> tuple[list[int], list[np.ndarray]]:
    """Drafts by transformers, as `prediction_checkpoints.reference_drafts` has them."""
    whole = reference_model(larger)
    model = copy.deepcopy(whole.model)
    attention, experts = list(model.layers)[-2:]
    model.layers = model.layers[:-2]
    parts = load_file(folder / "model.safetensors")
    read, drafts, logits = list(tokens[1:]), [], []
    states = model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state

    def norm(which: str, x: torch.Tensor) -> torch.Tensor:
        made = copy.deepcopy(model.layers[0].norm)
        made.weight.data = torch.from_numpy(parts[f"mtp.{which}.weight"])
        return made(x)

    for _ in range(num_drafts):
        embeddings = model.get_input_embeddings()(torch.tensor([read]))
        both = [norm("layers.0.enorm", embeddings), norm("layers.0.hnorm", states)]
        x = torch.cat(both, dim=-1) @ torch.from_numpy(parts["mtp.layers.0.eh_proj.weight"]).T
        mask = torch.full((len(read), len(read)), -torch.inf).triu(1)[None, None]
        out = norm("layers.1.final_layernorm", experts(attention(x, attention_mask=mask)))
        logits.append(whole.lm_head(out[0, -1]).numpy())
        drafts.append(int(logits[-1].argmax()))
        read.append(drafts[-1])
        states = torch.cat([states, out[:, -1:]], dim=1)
    return drafts, logits


def _layers_name(tensors: dict[str, np.ndarray]) -> str:
    return next(name.split(".0.")[0] for name in tensors if ".layers.0." in name)
