"""A tiny Llama with an EAGLE-3 head in each of its published forms, and what the head drafts by its definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE, HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 64, 131, 40, 4, 2, 16, 6
EPSILON, THETA = 1e-5, 500_000.0

_LAYER = {
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,  # fewer than the target's: such heads are trained on short texts
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "model_type": "llama",
}


def write_target(folder: Path, *, num_layers: int = NUM_LAYERS, seed: int = 0) -> Path:
    """Saves a random Llama."""
    config = transformers.LlamaConfig(**{**_LAYER, "num_hidden_layers": num_layers, "max_position_embeddings": 256})
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def write_head(folder: Path, form: str, *, norm_before_residual: bool = False, layers: Sequence[int] = ()) -> Path:
    """Saves a random head in the form of "SpecForge" or of "speculators"."""
    rng = np.random.default_rng(1)
    layer = {"SpecForge": "midlayer", "speculators": "layers.0"}[form]
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (SIZE, 3 * SIZE),
        "norm": (SIZE,),
        "lm_head": (DRAFT_VOCAB_SIZE, SIZE),
        f"{layer}.input_layernorm": (SIZE,),
        f"{layer}.hidden_norm": (SIZE,),
        f"{layer}.post_attention_layernorm": (SIZE,),
        f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * SIZE),
        f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * SIZE),
        f"{layer}.self_attn.o_proj": (SIZE, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj": (96, SIZE),
        f"{layer}.mlp.up_proj": (96, SIZE),
        f"{layer}.mlp.down_proj": (SIZE, 96),
    }
    if form == "speculators":
        shapes["embed_tokens"] = (VOCAB_SIZE, SIZE)
    tensors: dict[str, np.ndarray] = {
        f"{name}.weight": ("norm" in name) + 0.2 * rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    chosen = np.sort(rng.choice(VOCAB_SIZE, DRAFT_VOCAB_SIZE, replace=False))
    tensors["d2t"] = (chosen - np.arange(DRAFT_VOCAB_SIZE)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(VOCAB_SIZE), chosen)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB_SIZE}
    if form == "SpecForge":
        config |= {**_LAYER, "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
        config |= {"norm_before_residual": norm_before_residual, "pretraining_tp": 1, "torch_dtype": "bfloat16"}
        if layers:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    else:
        config |= {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "has_no_defaults_at_init": False,
            "norm_before_residual": norm_before_residual,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.2.0",
            "target_hidden_size": None,
            "transformer_layer_config": _LAYER,
            "eagle_aux_hidden_state_layer_ids": list(layers) or None,
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def reference_drafts(
    target: Path, head: Path, tokens: Sequence[int], num_drafts: int, layers: Sequence[int]
) -> tuple[list[int], list[np.ndarray]]:
    """The drafts behind these tokens and the logits of the draft vocabulary, as arXiv:2503.01840 defines them."""
    from safetensors.torch import load_file

    model = transformers.LlamaForCausalLM.from_pretrained(target, attn_implementation="eager").float().eval()
    w = {name.replace("layers.0.", "midlayer."): t for name, t in load_file(head / "model.safetensors").items()}
    norm_before_residual = json.loads((head / "config.json").read_text())["norm_before_residual"]
    entering = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([entering[i][0] for i in layers], dim=-1) @ w["fc.weight"].T
    embeddings = w.get("embed_tokens.weight", model.model.embed_tokens.weight)
    next_ids, drafts, logits = list(tokens[1:]), [], []
    for _ in range(num_drafts):
        x = _layer(w, embeddings[next_ids], states, norm_before_residual=norm_before_residual)
        logits.append((_norm(x[-1], w["norm.weight"]) @ w["lm_head.weight"].T).numpy())
        index = int(logits[-1].argmax())
        drafts.append(index + int(w["d2t"][index]))
        next_ids.append(drafts[-1])
        states = torch.cat([states, x[-1:]])
    return drafts, logits


def _layer(w, embeddings, states, *, norm_before_residual):
    normed = _norm(states, w["midlayer.hidden_norm.weight"])
    both = torch.cat([_norm(embeddings, w["midlayer.input_layernorm.weight"]), normed], dim=-1)
    length = len(both)
    q, k, v = (
        (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, HEAD_DIM).transpose(0, 1)
        for name in "qkv"
    )
    q, k = _rotated(q), _rotated(k)
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
    scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5 + torch.full((length, length), -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
    x = (normed if norm_before_residual else states) + attended @ w["midlayer.self_attn.o_proj.weight"].T
    y = _norm(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T


def _norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def _rotated(x):
    angles = torch.arange(x.shape[1])[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
