"""The engines that `compare.py` knows, and the files that each reads its weights from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Engine:
    """One engine with one type of weights.

    Attributes:
      library: Which of the peers runs it.
      width: Of its weights; engines of the same width are compared with each other.
      weights: Which files it reads: "checkpoint", "float32", a type of GGUF, or "gguf": the file that --model gives.
      arguments: For the peer.
    """

    library: str
    width: str
    weights: str
    arguments: dict[str, Any] = field(default_factory=dict)


ENGINES = {
    "jaxis-float32": Engine("jaxis", "float32", "float32", {"dtype": "float32"}),
    "jaxis-bf16": Engine("jaxis", "bf16", "checkpoint"),
    "jaxis-int8": Engine("jaxis", "int8", "checkpoint", {"quantization": "int8"}),
    "jaxis-int4": Engine("jaxis", "int4", "checkpoint", {"quantization": "int4"}),
    "transformers-float32": Engine("transformers", "float32", "checkpoint", {"dtype": "float32"}),
    "transformers-bf16": Engine("transformers", "bf16", "checkpoint", {"dtype": "bfloat16"}),
    "llama.cpp-bf16": Engine("llama.cpp", "bf16", "bf16"),
    "llama.cpp-q8_0": Engine("llama.cpp", "int8", "q8_0"),
    "llama.cpp-q4_0": Engine("llama.cpp", "int4", "q4_0"),
    # The same files; llama.cpp always quantizes activations to 8 bits.
    **{
        f"{name}-{weights}{suffix}": Engine(name, weights, weights, arguments)
        for weights in ("q8_0.gguf", "q4_0.gguf", "q4_k_m.gguf", "gguf")
        for name, suffix, arguments in (
            ("jaxis", "", {}),
            ("jaxis", "-int8-activations", {"quantization": "int8_activations"}),
            ("llama.cpp", "", {}),
            ("llama.cpp", "-as-stored", {"repack": False}),
        )
    },
}
DEFAULT_ENGINES = tuple(name for name in ENGINES if "gguf" not in name)
DEFAULT_GGUF_ENGINES = tuple(name for name, engine in ENGINES.items() if engine.weights == "gguf")


def prepare_weights(checkpoint: Path, weights: str, work: Path) -> Path:
    """The checkpoint's weights in the files that an engine reads; made in `work` unless they are there.

    Args:
      checkpoint: A folder; or a GGUF file, for engines whose `weights` are "gguf".
      weights: The engine's.
      work: Folder for what is made.

    Raises:
      OSError, CheckpointError: They cannot be made.
    """
    if (weights == "gguf") != checkpoint.is_file():
        raise OSError("engines named after gguf alone, and no others, read the GGUF file that --model gives")
    if weights in ("checkpoint", "gguf"):
        return checkpoint
    weights = weights.removesuffix(".gguf")
    if weights == "float32":
        return _made(work / f"{checkpoint.name}-float32", lambda target: _write_float32(checkpoint, target))
    from gguf_file import quantize_gguf, write_gguf

    plain = _made(work / f"{checkpoint.name}-bf16.gguf", lambda target: write_gguf(checkpoint, target))
    if weights == "bf16":
        return plain
    return _made(work / f"{checkpoint.name}-{weights}.gguf", lambda target: quantize_gguf(plain, target, weights))


def _made(target: Path, make: Callable[[Path], None]) -> Path:
    """The target, made beside its place first, so that what stands there is whole."""
    if not target.exists():
        unfinished = target.with_name(f"unfinished-{target.name}")
        make(unfinished)
        unfinished.rename(target)
    return target


def _write_float32(checkpoint: Path, target: Path) -> None:
    """The same checkpoint with float32 weights, for engines that keep the file's type in memory."""
    import numpy as np
    from safetensors.numpy import save_file

    from jaxis.loading.checkpoint import Checkpoint

    target.mkdir(exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    with Checkpoint(checkpoint) as tensors:
        weights = {name: tensor.astype(np.float32) for name, tensor in tensors.iterate()}
    save_file(weights, target / "model.safetensors")
