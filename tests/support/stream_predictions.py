"""Tiny checkpoints of models with residual streams and a layer that predicts later tokens, and what it drafts.

Its parts around transformers' blocks are put together as in vLLM: of some families it has streams, too, of others none.
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
from safetensors.numpy import load_file, save_file
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from tests.support.parity import FAMILIES, Family, checkpoint_folder, reference_model


@dataclass(frozen=True)
class Form:
    """A family's layer that predicts.

    Attributes:
      more: For each list of config.json, its entry of the layer.
      layers: Name of the model's layers in the files that transformers saves.
      module, layer: Names of the parts around the decoder layer, and of its own, in the file.
      parts: (embedding norm, hidden norm, projections) below `module`.
      norm: Final norm there.
      center: Mean of norms' weights.
      has_streams: True if the layer is one of the model's with streams, and the model hands it its streams.
      mixer: Tensors of the model's last mixture of streams, and what the layer's own are called; None without streams.
    """

    more: dict[str, str]
    layers: str
    module: str
    layer: str
    parts: tuple[str, ...] = ("enorm", "hnorm", "eh_proj")
    norm: str = ""
    center: float = 1.0
    has_streams: bool = False
    mixer: tuple[str, str] | None = None


FORMS = {
    "GLM-5.3-Flash": Form(
        {"layer_types": "indexed_attention", "mlp_layer_types": "sparse", "indexer_types": "full"},
        "model.language_model.layers",
        "model.language_model.layers.4.",
        "model.language_model.layers.4.",
        norm="shared_head.norm",
    ),
    "Qwen3.8-Flash-Next": Form(
        {"layer_types": "indexed_attention"},
        "model.layers",
        "mtp.",
        "mtp.layers.0.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden"),
        center=0.0,
        has_streams=True,
        mixer=("model.hyper_connection_mixer.", "hyper_connection_mixer."),
    ),
    "DeepSeek V4": Form(
        {"layer_types": "sliding_attention", "mlp_layer_types": "moe"},
        "model.layers",
        "mtp.0.",
        "mtp.0.",
        ("enorm", "hnorm", "e_proj", "h_proj"),
        norm="norm",
        has_streams=True,
        mixer=("model.hc_head.hc_", "hc_head_"),
    ),
    "Hy4": Form(
        {"layer_types": "indexed_attention", "mlp_layer_types": "sparse", "indexer_types": "full"},
        "model.layers",
        "model.mtp_layers.0.",
        "model.mtp_layers.0.",
        norm="final_layernorm",
    ),
}


def larger(name: str, **changes: int) -> Family:
    """The family with some other settings and one layer more, of the kind that predicts."""
    row = next(each for each in FAMILIES if each.name == name)
    config, more = {**row.config, **changes}, FORMS[name].more
    number = config.get("num_hidden_layers", 2)
    for key, kind in more.items():
        if key in config:
            config[key] = [*config[key], kind]
    return dataclasses.replace(
        row, name=f"{name}, and one {changes}", config={**config, "num_hidden_layers": number + 1}
    )


def write_streams_checkpoint(folder: Path, name: str, **changes: int) -> Path:
    """Saves a family's model, with some other settings, and the layer that predicts."""
    form = FORMS[name]
    saved = Path(checkpoint_folder(larger(name, **changes)))
    config, tensors = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    text: dict[str, Any] = config.get("text_config", config)
    number, size = text["num_hidden_layers"] - 1, text["hidden_size"]
    last = f"{form.layers}.{number}."
    assert any(key.startswith(last) for key in tensors)
    rng = np.random.default_rng(0)

    def random(*shape: int, center: float = 0.0) -> np.ndarray:
        return (center + 0.2 * rng.standard_normal(shape)).astype(np.float32)

    tensors = {
        f"{form.layer}{key.removeprefix(last)}" if key.startswith(last) else key: tensor
        for key, tensor in tensors.items()
        if form.has_streams or not (key.startswith(last) and "hc_" in key)
    }
    embedding_norm, hidden_norm, *projections = form.parts
    tensors[f"{form.module}{embedding_norm}.weight"] = random(size, center=form.center)
    tensors[f"{form.module}{hidden_norm}.weight"] = random(_size_of_hidden_norm(name, text), center=form.center)
    for projection in projections:
        tensors[f"{form.module}{projection}.weight"] = random(size, 2 * size // len(projections))
    if form.norm:
        tensors[f"{form.module}{form.norm}.weight"] = random(size, center=form.center)
    if form.mixer is not None:
        of_model, own = form.mixer
        for key in [key for key in tensors if key.startswith(of_model)]:
            center = form.center if "norm" in key else 0.0
            tensors[key.replace(of_model, f"{form.module}{own}")] = random(*tensors[key].shape, center=center)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text |= {key: text[key][:number] for key in form.more} | {"num_hidden_layers": number}
    if name != "Qwen3.8-Flash-Next":
        text["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_last_token_streams_checkpoint(folder: Path, name: str) -> Path:
    """Saves a model whose next token follows from the last one alone, with a layer that predicts as the model does.

    Blocks add 0, and the layer's projections let the embedding of the next token through.
    """
    form = FORMS[name]
    write_streams_checkpoint(folder, name)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if key.removesuffix(".weight").endswith(_LAST_PROJECTIONS):
            tensors[key] = np.zeros_like(tensor)
    embedding_norm, _, projection, *others = form.parts
    tensors[f"{form.module}{embedding_norm}.weight"][:] = form.center
    for which in (projection, *others):
        tensor = tensors[f"{form.module}{which}.weight"]
        tensors[f"{form.module}{which}.weight"] = np.eye(*tensor.shape, dtype=np.float32) * (which == projection)
    if form.norm:
        of_model = f"{form.layers.removesuffix('layers')}norm.weight"
        tensors[f"{form.module}{form.norm}.weight"] = tensors[of_model].copy()
    if form.mixer is not None:
        of_model, own = form.mixer
        for key in [key for key in tensors if key.startswith(of_model)]:
            tensors[key.replace(of_model, f"{form.module}{own}")] = tensors[key].copy()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# Of attention, of feed-forward blocks and of n-grams.
_LAST_PROJECTIONS = ("o_proj", "out_proj", "wo_b", "down_proj", "w2", "value_proj")


def _size_of_hidden_norm(name: str, text: dict[str, Any]) -> int:
    return text["hidden_size"] * (text["hc_count"] if name == "Qwen3.8-Flash-Next" else 1)


@torch.no_grad()
def streams_reference(
    folder: Path, name: str, tokens: Sequence[int], num_drafts: int
) -> tuple[list[int], list[np.ndarray]]:
    """Drafts by transformers' blocks, as `prediction_checkpoints.reference_drafts` has them."""
    form = FORMS[name]
    whole = copy.deepcopy(reference_model(larger(name)))
    model = getattr(whole.model, "language_model", whole.model)
    layer, model.layers = model.layers[-1], model.layers[:-1]
    model.config.num_hidden_layers -= 1
    tensors = {key: torch.from_numpy(tensor) for key, tensor in load_file(folder / "model.safetensors").items()}

    def part(which: str) -> torch.Tensor:
        return tensors[f"{form.module}{which}"]

    def norm(which: str, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return normed * (part(f"{which}.weight") + 1.0 - form.center)

    embedding_norm, hidden_norm, *projections = form.parts
    states = _first_states(model, form, torch.tensor([tokens[:-1]]))
    next_ids, drafts, logits = list(tokens[1:]), [], []
    run, finish = _LAYERS[name](model, layer, part)
    for _ in range(num_drafts):
        e, h = norm(embedding_norm, model.embed_tokens(torch.tensor([next_ids]))), norm(hidden_norm, states)
        if form.has_streams:
            h = h.reshape(*h.shape[:2], -1, e.shape[-1])
            x = (e @ part(f"{projections[0]}.weight").T)[:, :, None] + h @ part(f"{projections[1]}.weight").T
            newest = run(x)
            out = finish(newest)
        else:
            x = torch.cat([e, h], dim=-1) @ part(f"{projections[0]}.weight").T
            newest = out = norm(form.norm, run(x))
        logits.append(whole.lm_head(out[0, -1]).numpy())
        drafts.append(int(logits[-1].argmax()))
        next_ids.append(drafts[-1])
        states = torch.cat([states, newest[:, -1:]], dim=1)
    return drafts, logits


def _first_states(model: Any, form: Form, ids: torch.Tensor) -> torch.Tensor:
    """States that the model hands to the layer: after its final norm, or its streams."""
    if not form.has_streams:
        return model(ids, use_cache=False).last_hidden_state
    found = []
    mixer = model.hc_head if hasattr(model, "hc_head") else model.hyper_connection_mixer
    with_hook = mixer.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    model(ids, use_cache=False)
    with_hook.remove()
    return found[0]


Run = Callable[[torch.Tensor], torch.Tensor]


def _plain(model: Any, layer: Any, part: Callable[[str], torch.Tensor]) -> tuple[Run, Run]:
    """A layer without streams: transformers' has the same blocks between connections."""
    del part

    def run(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        given: dict[str, Any] = {"attention_mask": torch.ones(x.shape[:2], dtype=torch.bool)}
        if hasattr(model, "rotary_emb"):
            mask = create_causal_mask(model.config, x, None, None, position_ids=positions, allow_is_causal_skip=False)
            given = {"attention_mask": mask, "position_embeddings": model.rotary_emb(x, position_ids=positions)}
        x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), position_ids=positions, **given)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))

    return run, lambda x: x


def _deepseek_v4(model: Any, layer: Any, part: Callable[[str], torch.Tensor]) -> tuple[Run, Run]:
    def run(x: torch.Tensor) -> torch.Tensor:
        one, positions = x[:, :, 0], torch.arange(x.shape[1])[None]
        return layer(
            x,
            position_embeddings={kind: model.rotary_emb(one, positions, layer_type=kind) for kind in _ROPES},
            position_ids=positions,
            attention_mask=create_sliding_window_causal_mask(model.config, one, None, None, position_ids=positions),
        )

    mixer, norm = copy.deepcopy(model.hc_head), copy.deepcopy(model.norm)
    for name in ("fn", "base", "scale"):
        getattr(mixer, f"hc_{name}").data = part(f"hc_head_{name}")
    norm.weight.data = part("norm.weight")
    return run, lambda x: norm(mixer(x))


_ROPES = ("main", "compress")


def _qwen4(model: Any, layer: Any, part: Callable[[str], torch.Tensor]) -> tuple[Run, Run]:
    def run(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        ropes = model.rotary_emb(flat, torch.arange(x.shape[1]).expand(3, 1, -1))
        mask = create_causal_mask(model.config, flat, None, None, allow_is_causal_skip=False)
        return layer(flat, position_embeddings=ropes, attention_mask=mask)

    mixer = copy.deepcopy(model.hyper_connection_mixer)
    for name, parameter in mixer.named_parameters():
        parameter.data = part(f"hyper_connection_mixer.{name}")
    return run, mixer


_LAYERS: dict[str, Callable[..., tuple[Run, Run]]] = {
    "GLM-5.3-Flash": _plain,
    "Qwen3.8-Flash-Next": _qwen4,
    "DeepSeek V4": _deepseek_v4,
    "Hy4": _plain,
}
