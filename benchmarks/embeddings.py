"""Texts per second of encoders, beside sentence-transformers' recipe in PyTorch on the same threads.

python benchmarks/embeddings.py [CHECKPOINT ...] [--texts 64] [--tokens 128] [--spread] [--rounds 5]

A checkpoint is the folder of a `BertModel`, or the name of a shape, which gets random weights. All engines get the same
token ids, in one process, in turns; each round begins with another one. An engine's figures are medians: texts per
second, and seconds of processor time, which depend less on what else the machine does. The recipe: batches of 32 and of
64 texts, sorted by length and padded to the longest, the mean of the hidden states that are no padding, divided by its
length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxis import LLM

_MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
}
SHAPES = {
    "all-MiniLM-L6-v2": _MINILM | {"vocab_size": 30_522, "num_hidden_layers": 6},
    "multilingual-e5-small": _MINILM | {"vocab_size": 250_037, "num_hidden_layers": 12},
}
BATCHES = (32, 64)
Embed = Callable[[Sequence[list[int]]], np.ndarray]


def save_random(shape: str, folder: Path) -> None:
    """Writes a checkpoint with random weights."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SHAPES[shape])).save_pretrained(folder)


def recipe(model: Any, batch_size: int) -> Embed:
    """Makes vectors as sentence-transformers does."""

    def embed(texts: Sequence[list[int]]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for first in range(0, len(texts), batch_size):
            indices = order[first : first + batch_size]
            width = max(len(texts[index]) for index in indices)
            ids, mask = (torch.zeros((len(indices), width), dtype=torch.long) for _ in range(2))
            for row, index in enumerate(indices):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            with torch.inference_mode():
                hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
                weights = mask[..., None].float()
                means = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
                found = torch.nn.functional.normalize(means, dim=1).numpy()
            for index, vector in zip(indices, found, strict=True):
                vectors[index] = vector
        return np.stack(vectors)

    return embed


def of_jaxis(llm: LLM) -> Embed:
    """Makes vectors with jaxis."""
    return lambda texts: np.array([output.outputs.embedding for output in llm.embed(list(texts))], np.float32)


def measure(folder: Path, texts: Sequence[list[int]], rounds: int) -> dict[str, float]:
    """Speed of each engine, and the smallest cosine of its vectors to the recipe's."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    llms = {name: LLM(folder, quantization=name, show_progress=False) for name in (None, "int8")}
    engines: dict[str, Embed] = {f"torch, batches of {size}": recipe(model, size) for size in BATCHES}
    engines |= {f"jaxis {name or 'float32'}": of_jaxis(llm) for name, llm in llms.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    expected, found = None, {}
    for name, embed in engines.items():  # compiles, and warms up
        vectors = embed(texts)
        expected = vectors if expected is None else expected
        found[f"{name}: smallest cosine"] = float(np.sum(vectors * expected, axis=1).min() / np.sum(expected[0] ** 2))
    for number in range(rounds):
        names = list(engines)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter(), time.process_time()
            engines[name](texts)
            seconds[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    for llm in llms.values():
        llm.close()
    for name, each in seconds.items():
        wall, processor = (statistics.median(column) for column in zip(*each, strict=True))
        found |= {f"{name}: texts/s": len(texts) / wall, f"{name}: processor seconds": processor}
    return found


def main() -> None:
    """Measures, and prints a JSON object a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", default=list(SHAPES))
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--spread", action="store_true", help="lengths from 2 to twice the tokens instead of all alike")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rng = np.random.default_rng(0)
    lengths = np.full(options.texts, options.tokens)
    if options.spread:
        lengths = rng.integers(2, 2 * options.tokens, options.texts, endpoint=True)
    texts = [rng.integers(1000, 30_000, length).tolist() for length in lengths]
    for checkpoint in options.checkpoints:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if checkpoint in SHAPES else Path(checkpoint)
            if checkpoint in SHAPES:
                save_random(checkpoint, folder)
            found = measure(folder, texts, options.rounds)
        print(json.dumps({"checkpoint": checkpoint} | {name: round(value, 6) for name, value in found.items()}))


if __name__ == "__main__":
    main()
