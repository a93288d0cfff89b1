"""Models with experts on simulated devices, as programs: `python -m tests.engine.expert_parallel NAME FOLDER ...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxis import LLM, SamplingParams
from jaxis.config import ModelConfig, ParallelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.kernels.weights import ExpertStacks, experts
from jaxis.layers.experts import JaxExperts
from jaxis.layers.module import named_modules
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.paged_sequences import PagedSequence, PagedSequences

# Several at once, of which one comes in chunks, and whose decodes are padded.
PROMPTS = [np.random.default_rng(length).integers(1, 130, length).tolist() for length in (5, 40, 1)]


def results(folder: str, **arguments: Any) -> tuple[np.ndarray, list[list[int]], set[float]]:
    """Logits of a prompt by the paged path, greedy tokens, and each device's share of the bytes of experts."""
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": "8MiB"}
    with LLM(folder, dtype="float32", show_progress=False, **sizes, **arguments) as llm:
        logits = llm.compute_logits(PROMPTS[1], path="paged")
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        return logits, [output.outputs[0].token_ids for output in outputs], shares(llm.engine.runner.model)


def shares(model: Any) -> set[float]:
    """Share of each array of experts that a device holds."""
    layers = [module for _, module in named_modules(model) if isinstance(module, JaxExperts)]
    arrays = [leaf for layer in layers for _, param in layer.named_parameters() for leaf in jax.tree.leaves(param)]
    return {shard.data.nbytes / array.nbytes for array in arrays for shard in array.addressable_shards}


def slots_of_experts(folder: str, size: int, num_tokens: int, padded_to: int) -> set[int]:
    """Number of a padded step's slots that are some expert's, in each layer."""
    mesh = make_mesh(size)
    config = VllmConfig(
        ModelConfig(folder, HFConfig.from_folder(folder)),
        parallel_config=ParallelConfig(size, enable_expert_parallel=True),
    )
    counts: list[int] = []

    def counted(x: jax.Array, expert_ids: jax.Array, weights: jax.Array, stacks: ExpertStacks) -> jax.Array:
        jax.debug.callback(lambda n: counts.append(int(n)), jnp.sum(expert_ids < stacks.num_experts))
        return experts(x, expert_ids, weights, stacks)

    with mock.patch("jaxis.layers.experts.experts", counted):
        paged = PagedSequences(load_model(config, mesh), mesh=mesh)
        paged.step([(PagedSequence(), PROMPTS[1][:num_tokens])], pad_tokens=padded_to, pad_requests=3)
    jax.effects_barrier()
    return set(counts)


def answers(folder: str, sizes: str, rules: str = "null") -> None:
    """Engines give the logits and greedy tokens of one device, and each device holds its own experts only."""
    quantization = json.loads(rules)
    expected, tokens, _ = results(folder, quantization=quantization)
    for size in map(int, sizes.split(",")):
        arguments = {"tensor_parallel_size": size, "enable_expert_parallel": True}
        logits, found, parts = results(folder, quantization=quantization, **arguments)
        error = np.abs(logits - expected).max() / np.abs(expected).max()
        assert error < 1e-4, (size, error)
        assert found == tokens, size
        assert parts == {1 / size}, (size, parts)
        print(f"{size} devices: {error:.1e}")


def padding(folder: str) -> None:
    """The rows of a step that are no token go to no expert, in any layer."""
    per_token = json.loads(Path(folder, "config.json").read_text())["num_experts_per_tok"]
    assert slots_of_experts(folder, size=4, num_tokens=19, padded_to=32) == {19 * per_token}


if __name__ == "__main__":
    _, name, *arguments = sys.argv
    {"answers": answers, "padding": padding}[name](*arguments)
