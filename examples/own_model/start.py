"""Writes Pocket with random weights as a checkpoint, and the logits of its own forward, for `jaxis verify --golden`.

python examples/own_model/start.py pocket-start
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from pocket import Config, Pocket
from safetensors.numpy import save_file

import jaxis
from jaxis.bringup.verify.golden import Golden, PromptLogits, checkpoint_hashes

EMBEDDED = Path(jaxis.__file__).parent / "assets" / "tiny"  # whose tokenizer and chat template Pocket takes
CONFIG: Config = {
    "architectures": ["PocketForCausalLM"],
    "vocab_size": json.loads((EMBEDDED / "config.json").read_text())["vocab_size"],
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"} | {
    **{"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
    **{"up": "up_proj", "down": "down_proj", "norm": "norm"},
}


def save(model: Pocket, folder: Path) -> None:
    """Writes config.json, the weights under the names that jaxis_pocket.py has, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tensors = {"model.embed_tokens": model.embeddings, "model.norm": model.norm}
    for i, layer in enumerate(model.layers):
        tensors |= {f"model.layers.{i}.{theirs}": getattr(layer, ours) for ours, theirs in NAMES.items()}
    arrays = {f"{name}.weight": np.asarray(value[...]) for name, value in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(EMBEDDED / name, folder / name)


def golden(model: Pocket, folder: Path) -> Golden:
    """What Pocket's own forward says of a few prompts, and how it goes on after one of them."""
    forward = nnx.jit(lambda model, ids: model(ids))
    rng = np.random.default_rng(0)

    def logits(ids: list[int]) -> np.ndarray:
        # Later tokens change nothing before them, so that one length is compiled.
        return np.asarray(forward(model, np.asarray(ids + [0] * (256 - len(ids)))))[: len(ids)]

    prompts = []
    for length in (1, 17, 200):
        ids = rng.integers(0, CONFIG["vocab_size"], length).tolist()
        prompts.append(PromptLogits(np.asarray(ids, np.int32), np.arange(length, dtype=np.int32), logits(ids)))
    ids = prompts[1].token_ids.tolist()
    rows = []
    for _ in range(16):
        rows.append(logits(ids)[-1])
        ids.append(int(rows[-1].argmax()))
    continuation = np.asarray(ids[len(prompts[1].token_ids) :], np.int32)
    versions = {"pocket.py": "0.1.0", "jax": jax.__version__}
    hashes = checkpoint_hashes(folder)
    return Golden(tuple(prompts), prompts[1].token_ids, continuation, np.stack(rows), versions, hashes)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    pocket = Pocket(CONFIG, nnx.Rngs(0))
    save(pocket, folder)
    golden(pocket, folder).save(folder.with_name(f"{folder.name}-golden.safetensors"))
