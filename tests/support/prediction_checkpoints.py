"""Tiny checkpoints with a layer that predicts later tokens, and what transformers drafts with it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpModel

from jaxis.layers.attention_metadata import AttentionMetadata
from tests.support.parity import FAMILIES, Family, reference_model

_EXTRA_PARTS = {
    "numbered": {"enorm": "E", "hnorm": "E", "eh_proj": "E,2E", "shared_head.norm": "E"},
    "separate": {"pre_fc_norm_embedding": "E", "pre_fc_norm_hidden": "E", "fc": "E,2E", "norm": "E"},
    "hidden first": {"token_layernorm": "E", "hidden_layernorm": "E", "input_proj": "E,2E", "final_layernorm": "E"},
}


def family(name: str, **config: Any) -> Family:
    """The row of the parity table of this name, with some other settings."""
    row = next(each for each in FAMILIES if each.name == name)
    # All layers that predict later tokens are sparse where the model's own are.
    settings = {key: value for key, value in row.config.items() if key != "mlp_only_layers"}
    return dataclasses.replace(row, name=f"{name} {config}", config={**settings, **config})


def with_more_layers(row: Family, number: int = 1) -> Family:
    """The family with so many layers more, of the kind that predicts."""
    config = dict(row.config)
    num_layers = config.get("num_hidden_layers", 2)
    if "layer_types" in config:
        kind = "full_attention" if "linear_attention" in config["layer_types"] else "sliding_attention"
        config["layer_types"] = [*config["layer_types"], *[kind] * number]
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = [*config["mlp_layer_types"], *["sparse"] * number]
    if "indexer_types" in config:
        config["indexer_types"] = [*config["indexer_types"], *["full"] * number]
    config["num_hidden_layers"] = num_layers + number
    return dataclasses.replace(row, name=f"{row.name}, and {number} more", config=config)


def write_prediction_checkpoint(
    folder: Path, row: Family, number: int = 1
) -> tuple[Path, transformers.PreTrainedModel]:
    """Saves the family's model of some layers more, the last of which are those that predict.

    Args:
      folder: Place to write to.
      row: The family.
      number: Layers that predict: one, or, where layers are numbered, any number.

    Returns:
      The folder, and the model of so many layers more.
    """
    larger = reference_model(with_more_layers(row, number))
    larger.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    num_layers, size = config["num_hidden_layers"] - number, config["hidden_size"]
    kind = _kind(config, row)
    rng = np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    for last in [f"model.layers.{num_layers + place}." for place in range(number)]:
        module = {"separate": "mtp.", "numbered": last, "hidden first": "model.mtp_layers.0."}[kind]
        layer = "mtp.layers.0." if kind == "separate" else module
        tensors = {f"{layer}{n.removeprefix(last)}" if n.startswith(last) else n: t for n, t in tensors.items()}
        for name, shape in _EXTRA_PARTS[kind].items():
            sizes = {"E": (size,), "E,2E": (size, 2 * size)}[shape]
            # Norms around 1, or around 0 where the file has them so.
            center = 0.0 if shape != "E" or "linear_attention" in config.get("layer_types", ()) else 1.0
            tensors[f"{module}{name}.weight"] = (center + 0.2 * rng.standard_normal(sizes)).astype(np.float32)
        if kind == "numbered":
            # Copies that published checkpoints have.
            tensors[f"{module}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            tensors[f"{module}shared_head.head.weight"] = tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": number}
    if "mlp_layer_types" in config and kind == "separate":
        config |= {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"]}
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if key in config:
            config[key] = config[key][:num_layers]
    if "linear_attention" in config.get("layer_types", ()):
        del config["num_nextn_predict_layers"]
    if row.architecture is not None:
        config["architectures"] = [row.architecture]
    (folder / "config.json").write_text(json.dumps(config))
    return folder, larger


def write_last_token_checkpoint(folder: Path, row: Family) -> Path:
    """Saves a model whose next token follows from the last one alone, with a layer that predicts as the model does.

    Attention and feed-forward blocks add 0, and the layer's projection lets the embedding of the next token through.
    """
    write_prediction_checkpoint(folder, row)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        if name.endswith(("model.norm.weight", "enorm.weight", "shared_head.norm.weight")):
            tensors[name] = np.ones_like(tensor)
        if name.endswith("eh_proj.weight"):
            tensors[name] = np.eye(*tensor.shape, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _kind(config: dict[str, Any], row: Family) -> str:
    """Form of a checkpoint's names of the layer: a key of _EXTRA_PARTS."""
    if row.architecture == "MiMoForCausalLM":
        return "hidden first"
    # Families with an indexer have layer_types too.
    return "separate" if "layer_types" in config and "index_topk" not in config else "numbered"


@torch.no_grad()
def reference_drafts(
    folder: Path, larger: transformers.PreTrainedModel, tokens: Sequence[int], num_drafts: int
) -> tuple[list[int], list[np.ndarray]]:
    """Drafts by transformers after the last of them, which the model itself has chosen.

    Returns:
      The drafts, and the logits [V] that each is the most likely of.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    hidden = model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
    predict = _mtp_layer(model) if getattr(model.config, "num_mtp_layers", None) else _own_loop(folder, model, larger)
    next_ids, drafts, logits = list(tokens[1:]), [], []
    states = hidden
    for _ in range(num_drafts):
        out = predict(torch.tensor([next_ids]), states)
        logits.append(model.lm_head(out[0, -1]).numpy())
        drafts.append(int(logits[-1].argmax()))
        next_ids.append(drafts[-1])
        states = torch.cat([states, out[:, -1:]], dim=1)
    return drafts, logits


@torch.no_grad()
def reference_chain_drafts(folder: Path, tokens: Sequence[int]) -> tuple[list[int], list[np.ndarray]]:
    """Drafts by several layers, each for one of them, as transformers runs the layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    hidden = model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
    positions = torch.arange(1, len(tokens))[None]
    drafts, logits, _ = _mtp_model(model)(torch.tensor([tokens[1:]]), hidden, None, positions, None)
    return drafts[0].tolist(), list(logits[0].numpy())


def _mtp_model(model):
    first, number = model.config.num_hidden_layers, model.config.num_mtp_layers
    # It looks for the layers of published sizes.
    layers = [rf"model\.layers\.{index}\..*" for index in range(first, first + number)]
    model._keys_to_ignore_on_load_unexpected = [*layers, r"^mtp\."]
    return MtpModel.from_pretrained(model).float().eval()


def _mtp_layer(model):
    """transformers' own: next ids [1, T], states [1, T, E] -> [1, T, E]."""
    mtp = _mtp_model(model)

    def predict(next_ids, states):
        # A row has the place of the token that it embeds.
        positions = torch.arange(1, next_ids.shape[1] + 1)[None]
        return mtp.forward_layer(0, states, positions, None, input_ids=next_ids)

    return predict


def _own_loop(folder: Path, model, larger):
    """The same of a family whose layer transformers does not load: its decoder layer and norms, put together here."""
    tensors = load_file(folder / "model.safetensors")
    number = model.config.num_hidden_layers
    modules = {"model.mtp_layers.0": "hidden first", "mtp": "separate", f"model.layers.{number}": "numbered"}
    module, kind = next(each for each in modules.items() if any(name.startswith(f"{each[0]}.") for name in tensors))
    hidden_first = kind == "hidden first"
    parts = [torch.from_numpy(tensors[f"{module}.{name}.weight"]) for name in _EXTRA_PARTS[kind]]
    embedding_norm, hidden_norm, projection, final_norm = parts
    layer = larger.model.layers[-1]

    def norm(weight, x):
        made = copy.deepcopy(model.model.norm)
        made.weight.data = weight
        return made(x)

    def predict(next_ids, states):
        embeddings = model.model.embed_tokens(next_ids)
        both = [norm(embedding_norm, embeddings), norm(hidden_norm, states)]
        joined = torch.cat(both[::-1] if hidden_first else both, dim=-1)
        length = next_ids.shape[1]
        positions = torch.arange(1, length + 1)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        ropes = model.model.rotary_emb(joined, positions)
        x = layer(joined @ projection.T, position_embeddings=ropes, attention_mask=mask, position_ids=positions)
        # Layers with an indexer also return what it has selected.
        return norm(final_norm, x[0] if isinstance(x, tuple) else x)

    return predict


class WholeDrafts:
    """Drafts by jaxis: of whole sequences without a cache.

    Args:
      model: With layers that draft tokens.
      padded: Most tokens; one program serves all lengths.
    """

    def __init__(self, model: Any, padded: int = 64) -> None:
        self._model, self._padded = model, padded
        graph, self._state = nnx.split(model)
        metadata = AttentionMetadata.for_whole_sequences([padded])

        @jax.jit
        def run(state: nnx.State, input_ids: jax.Array) -> jax.Array:
            merged = nnx.merge(graph, state)
            _, hidden, aux = merged(None, input_ids, metadata)
            return merged.draft.first_states(hidden, aux)

        @jax.jit
        def draft(state: nnx.State, token_ids: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
            merged = nnx.merge(graph, state)
            _, states = merged.draft(merged, None, token_ids, states, metadata)
            return states, merged.draft.compute_logits(merged, states)

        self._run, self._draft = run, draft

    def __call__(self, tokens: Sequence[int], num_drafts: int) -> tuple[list[int], list[np.ndarray]]:
        """The drafts behind these tokens, and the logits that each is the most likely of."""
        layers = self._model.draft
        states = self._run(self._state, self._pad(tokens))
        read, drafts, logits = list(tokens[1:] if layers.reads_next_token else tokens), [], []
        for _ in range(num_drafts):
            newest, rows = self._draft(self._state, self._pad(read), states)
            last = len(read) - 1
            states = states.at[last + 1].set(newest[last])
            logits.append(np.asarray(rows[last]))
            drafts.append(int(layers.token_ids(jnp.argmax(rows[last]))))
            read.append(drafts[-1])
        return drafts, logits

    def _pad(self, token_ids: Sequence[int]) -> jax.Array:
        return jnp.asarray([*token_ids, *[0] * (self._padded - len(token_ids))])
