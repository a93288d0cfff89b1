"""Writes a checkpoint folder with random weights, so that a real-sized model can be measured without a download.

python benchmarks/random_checkpoint.py FOLDER
python benchmarks/random_checkpoint.py FOLDER --shape qwen3-1.7b
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import construct_model
from jaxis.models.registry import get_model_class

# config.json by name. Those of Qwen3-0.6B and 1.7B and Qwen3.5-0.8B, as far as they decide speed, and others in the
# manner of published ones: qwen3-0.8b reads and writes per token as many bytes as qwen3.5-0.8b with its states, a token
# of qwen3-moe-1.5b uses 0.5 billion parameters, and one of deepseek-v2-1.7b 0.6 with all of its latent attention.
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
WEIGHT_SCALE = 0.02
NOISE_ELEMENTS = 1 << 22


def write_random_checkpoint(folder: Path, config: dict[str, Any], *, seed: int = 0) -> None:
    """Writes config.json and model.safetensors, bfloat16, with the names and shapes of jaxis's own model class.

    Experts stand one by one, as `experts.3.gate_proj.weight`.

    Args:
      folder: Is made.
      config: What to write as config.json.
      seed: Of the weights.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    vllm_config = VllmConfig(ModelConfig(str(folder), HFConfig(config)))
    model_class = get_model_class(config["architectures"])
    model = nnx.eval_shape(lambda: construct_model(model_class, vllm_config))
    parameters = {name: param.get_value().shape for name, param in model.named_parameters()}
    shapes = {name: shape for stack in parameters.items() for name, shape in _tensors_of(*stack)}

    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    # Drawing each weight would take longer than the benchmark: tensors start at different places of one noise.
    random = np.random.default_rng(seed)
    noise = (random.standard_normal(NOISE_ELEMENTS, np.float32) * WEIGHT_SCALE).astype(ml_dtypes.bfloat16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            if name.endswith("norm.weight"):
                values = np.ones(size, ml_dtypes.bfloat16)
            else:
                values = np.resize(np.roll(noise, random.integers(NOISE_ELEMENTS)), size)
            file.write(values.tobytes())


def _tensors_of(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A checkpoint's names and shapes of what is in a parameter."""
    module, _, stack = name.rpartition(".")
    if module.endswith(".experts"):
        for expert in range(shape[0]):
            yield f"{module}.{expert}.{stack}.weight", shape[1:]
    else:
        yield name, shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already: give another folder")
    write_random_checkpoint(arguments.folder, SHAPES[arguments.shape])


if __name__ == "__main__":
    main()
