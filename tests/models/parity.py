"""Every supported family against transformers: what is compared, and how far apart it is.

`test_parity.py` holds the figures to their limits; `python tests/models/parity.py` prints them as a Markdown table.
To add a family, add a row to FAMILIES.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from paged_sequences import PagedSequence, PagedSequences

from jaxis.bringup.compare import relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.loading.model_loader import load_model
from jaxis.parallel.mesh import make_mesh

# Threads cost more than they gain on models this small.
torch.set_num_threads(1)

PROMPT_LENGTHS = (1, 17, 500)
PAGED_LENGTH = 150  # crosses many blocks and stays within every family's `max_position_embeddings`
GREEDY_TOKENS = 40

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One row of the table: `config` holds what it changes of the common tiny sizes."""

    name: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict, hash=False)


def _rope(rope_type: str = "default", theta: float = 10_000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **settings}}


_YARN = _rope("yarn", 1_000_000.0, factor=4.0, original_max_position_embeddings=256)
_LLAMA31 = _rope(
    "llama3", 500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)

FAMILIES = (
    Family("Llama 2", "LlamaConfig", {"num_key_value_heads": 4, **_rope()}),
    Family("Llama 3", "LlamaConfig", _rope(theta=500_000.0)),
    Family("Llama 3.1", "LlamaConfig", {"tie_word_embeddings": True, **_LLAMA31}),
    Family("Llama, biases", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    Family("Llama, head_dim, one kv head", "LlamaConfig", {"head_dim": 24, "num_key_value_heads": 1}),
    Family("Llama, linear rope", "LlamaConfig", _rope("linear", factor=3.0)),
    Family("Llama, dynamic rope", "LlamaConfig", {"max_position_embeddings": 200, **_rope("dynamic", factor=2.0)}),
    Family("Llama, yarn rope", "LlamaConfig", _rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    Family("Qwen2", "Qwen2Config", _rope(theta=1_000_000.0)),
    Family("Qwen2, tied", "Qwen2Config", {"tie_word_embeddings": True}),
    Family("Qwen2.5, yarn rope", "Qwen2Config", _YARN),
    Family(
        "Qwen2, window layers",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    Family("Qwen3", "Qwen3Config", {"head_dim": 32, **_rope(theta=1_000_000.0)}),
    Family("Qwen3, tied", "Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    Family("Qwen3, biases, yarn rope", "Qwen3Config", {"head_dim": 8, "attention_bias": True, **_YARN}),
    Family("Mistral, window", "MistralConfig", {"sliding_window": 13}),
    Family("Mistral", "MistralConfig", {"sliding_window": None, "head_dim": 24, **_rope(theta=1_000_000.0)}),
)


@functools.cache
def reference_model(family: Family) -> transformers.PreTrainedModel:
    """A tiny transformers model whose every parameter, norms and biases included, is random."""
    config = getattr(transformers, family.config_class)(**_SIZES | family.config, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms around 1, so that a missing one shows and activations keep their size.
            center = 1.0 if "norm" in name else 0.0
            parameter.copy_(center + 0.2 * torch.randn_like(parameter))
    return model


@functools.cache
def checkpoint_folder(family: Family) -> str:
    """The model saved as transformers saves it. The folder goes when the process does."""
    folder = tempfile.TemporaryDirectory(prefix="jaxis_parity_")
    _folders.append(folder)
    reference_model(family).save_pretrained(folder.name)
    return folder.name


_folders: list[tempfile.TemporaryDirectory] = []


@functools.cache
def loaded_model(family: Family, dtype: Any = jnp.float32) -> nnx.Module:
    """The checkpoint as jaxis loads it."""
    folder = checkpoint_folder(family)
    model_config = ModelConfig(folder, HFConfig.from_folder(folder), dtype=dtype, max_model_len=1024)
    return load_model(VllmConfig(model_config), make_mesh())


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, _SIZES["vocab_size"], length).tolist()


@functools.cache
def reference_run(family: Family, length: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """transformers' logits [T, V] and hidden states (entering each layer, and after the final norm), each [T, E]."""
    with torch.no_grad():
        result = reference_model(family)(torch.tensor([prompt(length)]), output_hidden_states=True, use_cache=False)
    return result.logits[0].numpy(), [states[0].numpy() for states in result.hidden_states]


@functools.cache
def whole_run(
    family: Family, lengths: tuple[int, ...] = PROMPT_LENGTHS, dtype: Any = jnp.float32
) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
    """As `reference_run`, for prompts of these lengths in one flat batch without a cache."""
    model = loaded_model(family, dtype)
    model.model.aux_hidden_state_layers = tuple(range(len(model.model.layers)))
    graph, state = nnx.split(model)
    model.model.aux_hidden_state_layers = ()

    @jax.jit
    def forward(state: nnx.State, input_ids: jax.Array, metadata: AttentionMetadata) -> tuple[jax.Array, list]:
        merged = nnx.merge(graph, state)
        _, hidden, aux = merged(None, input_ids, metadata)
        return merged.compute_logits(hidden), [*aux, hidden]

    input_ids = jnp.asarray(np.concatenate([prompt(length) for length in lengths]), jnp.int32)
    logits, states = forward(state, input_ids, AttentionMetadata.for_whole_sequences(lengths))
    ends = np.cumsum(lengths)
    return {
        length: (np.asarray(logits)[end - length : end], [np.asarray(s)[end - length : end] for s in states])
        for length, end in zip(lengths, ends, strict=True)
    }


@functools.cache
def paged_sequences(family: Family, dtype: Any = jnp.float32) -> PagedSequences:
    return PagedSequences(loaded_model(family, dtype), dtype=dtype)


# One size for every step, since compiling costs more than the padding.
PADDING = {"pad_tokens": PAGED_LENGTH + 10, "pad_requests": 4}


def prefill(family: Family, tokens: Sequence[int]) -> np.ndarray:
    """Logits of a whole prompt run in one step, padded."""
    (logits,) = paged_sequences(family).step([(PagedSequence(), tokens)], **PADDING)
    return logits


def chunked(family: Family, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Logits of a prompt run in chunks, each beside a decode of another sequence."""
    paged, sequence, other = paged_sequences(family), PagedSequence(), PagedSequence()
    parts = [
        paged.step([(sequence, tokens[i : i + chunk]), (other, [5])], **PADDING)[0]
        for i in range(0, len(tokens), chunk)
    ]
    return np.concatenate(parts)


def prefix_shared(family: Family, tokens: Sequence[int], shared: int) -> np.ndarray:
    """Logits after a prefix whose blocks another sequence filled, while that one goes on beside it."""
    paged, owner = paged_sequences(family), PagedSequence()
    paged.step([(owner, tokens[:shared])], **PADDING)
    sequence = paged.fork(owner, shared)
    (logits, _) = paged.step([(sequence, tokens[shared:]), (owner, [7])], **PADDING)
    return logits


PATHS = {
    "prefill": lambda family, tokens: prefill(family, tokens),
    "chunks of 7": lambda family, tokens: chunked(family, tokens, 7),
    "token by token": lambda family, tokens: chunked(family, tokens, 1),
    "shared prefix": lambda family, tokens: prefix_shared(family, tokens, 64),
}


def path_error(family: Family, path: str) -> float:
    """Relative error of a paged path's logits against transformers' (its last rows, where a path gives no others)."""
    logits = PATHS[path](family, prompt(PAGED_LENGTH))
    return relative_error(logits, reference_run(family, PAGED_LENGTH)[0][-len(logits) :])


def greedy_tokens(family: Family, tokens: Sequence[int]) -> list[int]:
    """GREEDY_TOKENS most likely continuations, decoded through the cache."""
    paged, sequence = paged_sequences(family), PagedSequence()
    (logits,) = paged.step([(sequence, tokens)], **PADDING)
    produced = [int(logits[-1].argmax())]
    while len(produced) < GREEDY_TOKENS:
        (logits,) = paged.step([(sequence, produced[-1:])], **PADDING)
        produced.append(int(logits[-1].argmax()))
    return produced


def reference_greedy_tokens(family: Family, tokens: Sequence[int]) -> list[int]:
    with torch.no_grad():
        output = reference_model(family).generate(
            torch.tensor([tokens]), max_new_tokens=GREEDY_TOKENS, do_sample=False, eos_token_id=None
        )
    return output[0, len(tokens) :].tolist()


def layer_error(family: Family, length: int) -> float:
    """Largest relative error of any layer's hidden states."""
    states, expected = whole_run(family)[length][1], reference_run(family, length)[1]
    return max(relative_error(a, e) for a, e in zip(states, expected, strict=True))


def logits_error(family: Family, length: int) -> float:
    return relative_error(whole_run(family)[length][0], reference_run(family, length)[0])


def main() -> None:
    lengths = " | ".join(f"logits, {length} tokens" for length in PROMPT_LENGTHS)
    print(f"| family | {lengths} | layers | greedy | {' | '.join(PATHS)} |")
    print("|---" * (4 + len(PROMPT_LENGTHS) + len(PATHS) - 1) + "|")
    for family in FAMILIES:
        figures = [f"{logits_error(family, length):.1e}" for length in PROMPT_LENGTHS]
        figures.append(f"{max(layer_error(family, length) for length in PROMPT_LENGTHS):.1e}")
        produced, expected = greedy_tokens(family, prompt(17)), reference_greedy_tokens(family, prompt(17))
        figures.append(f"{sum(p == e for p, e in zip(produced, expected, strict=True))}/{GREEDY_TOKENS}")
        figures += [f"{path_error(family, path):.1e}" for path in PATHS]
        print(f"| {family.name} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
