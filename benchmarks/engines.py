"""The engines that `compare.py` knows, and the files that each reads its weights from."""

from __future__ import annotations

import dataclasses
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


BASELINE = "baseline"
_ROWS = [{"module_path": ".*", "weight_qtype": "int8", "act_qtype": "int8"}]
_GGUF_WIDTHS = {"bf16.gguf": "bf16", "q8_0.gguf": "int8", "q4_0.gguf": "int4", "q4_k_m.gguf": "int4", "gguf": "gguf"}

ENGINES = {
    "jaxis-float32": Engine("jaxis", "float32", "float32", {"dtype": "float32"}),
    "jaxis-bf16": Engine("jaxis", "bf16", "checkpoint"),
    # llama.cpp rounds activations to bfloat16 before it multiplies them with such weights.
    "jaxis-bf16-activations": Engine("jaxis", "bf16", "checkpoint", {"dtype": "bfloat16"}),
    "jaxis-int8": Engine("jaxis", "int8", "checkpoint", {"quantization": "int8"}),
    "jaxis-int8-rows": Engine("jaxis", "int8", "checkpoint", {"quantization": _ROWS}),
    "jaxis-int4": Engine("jaxis", "int4", "checkpoint", {"quantization": "int4"}),
    **{
        f"jaxis-{weights}{suffix}": Engine("jaxis", width, weights, arguments)
        for weights, width in _GGUF_WIDTHS.items()
        # The peers always quantize activations to 8 bits.
        for suffix, arguments in (("", {}), ("-int8-activations", {"quantization": "int8_activations"}))
    },
    "transformers-float32": Engine("transformers", "float32", "checkpoint", {"dtype": "float32"}),
    "transformers-bf16": Engine("transformers", "bf16", "checkpoint", {"dtype": "bfloat16"}),
    **{
        f"{library}-{weights.removesuffix('.gguf')}{suffix}": Engine(library, width, weights, arguments)
        for library, suffix, arguments in (
            ("llama.cpp", "", {}),
            ("llama.cpp", "-as-stored", {"repack": False}),
            ("ik_llama.cpp", "", {}),
        )
        for weights, width in _GGUF_WIDTHS.items()
    },
}
DEFAULT_ENGINES = (
    *("jaxis-float32", "jaxis-bf16", "jaxis-int8", "jaxis-int4"),
    *("jaxis-q8_0.gguf-int8-activations", "jaxis-q4_k_m.gguf-int8-activations"),
    *("transformers-float32", "transformers-bf16"),
    *("llama.cpp-bf16", "llama.cpp-q8_0", "llama.cpp-q4_0", "llama.cpp-q4_k_m"),
    *("ik_llama.cpp-bf16", "ik_llama.cpp-q8_0", "ik_llama.cpp-q4_0", "ik_llama.cpp-q4_k_m"),
)
DEFAULT_GGUF_ENGINES = tuple(name for name, engine in ENGINES.items() if engine.weights == "gguf")


def engine_of(name: str) -> Engine:
    """The engine of a name; "baseline:" before one of jaxis's is the same in the tree that --baseline gives.

    Raises:
      KeyError: There is none.
    """
    baseline, _, rest = name.rpartition(":")
    engine = ENGINES[rest]
    if not baseline:
        return engine
    if baseline != BASELINE or engine.library != "jaxis":
        raise KeyError(name)
    return dataclasses.replace(engine, library=BASELINE)


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
    if weights == "float32":
        return _made(work / f"{checkpoint.name}-float32", lambda target: _write_float32(checkpoint, target))
    from gguf_file import quantize_gguf, write_gguf

    plain = _made(work / f"{checkpoint.name}-bf16.gguf", lambda target: write_gguf(checkpoint, target))
    if weights == "bf16.gguf":
        return plain
    quantization = weights.removesuffix(".gguf")
    return _made(work / f"{checkpoint.name}-{weights}", lambda target: quantize_gguf(plain, target, quantization))


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
