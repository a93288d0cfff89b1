"""Sensitivity of modules: the divergence of predictions that quantizing one module alone causes, for each width.

For a small change D of a module's weights, the divergence of the next-token distribution p is, to second order,

    KL = 1/2 sum over i, j of F_ij D_i D_j,    F = E over y ~ p of g g^T,    g = gradient of log p(y),

averaged over the predictions on text. Errors of rounding are nearly uncorrelated, so only the diagonal of the Fisher
information F matters. Squares of gradients estimate it: for each window of the text, tokens y are drawn from the
model's own predictions, and the gradient of their log-probability is squared. (Contributions of different tokens to
such a gradient have a mean of zero and are uncorrelated, so the square of the sum is the sum of the squares.)
As in: Dong et al., HAWQ-V2 (2019); Kim et al., SqueezeLLM (2023).

The cost is a forward and a backward pass of float32 weights over each window, and one quantization of each weight to
each width. Weights, gradients and the sum of their squares are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.calibration.module_schemes import weight_schemes
from jaxis.config import ModelConfig, VllmConfig
from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.kernels.weights import check_quantizable, dequantize, quantize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.models.model_loader import load_model
from jaxis.models.tied_tables import config_as_stored
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme
from jaxis.quantization_rules import QuantizationRule

WINDOW_TOKENS = 256
MAX_WINDOWS = 16
_LOGITS_ROWS = 64
_ROWS_AT_ONCE = 1 << 22  # elements of a matrix whose errors are computed together

OnProgress = Callable[[int, int], None]
"""Receives (steps done, steps in all)."""


@dataclass(frozen=True)
class Option:
    """One way to quantize a module.

    Attributes:
      kl: Increase of the mean divergence of a prediction by quantizing this module alone, in nats, to second order.
    """

    rule: QuantizationRule
    num_bytes: int
    kl: float


@dataclass(frozen=True)
class ModuleSensitivity:
    """Cost of quantizing a module, with one option for each width that fits it."""

    name: str
    num_weights: int
    options: tuple[Option, ...]


def measure_sensitivity(
    folder: Path,
    windows: Sequence[list[int]],
    rules: Sequence[QuantizationRule],
    *,
    on_progress: OnProgress | None = None,
) -> list[ModuleSensitivity]:
    """Measures the cost of each rule for each module of a model that can be quantized.

    `windows` are token ids of text, of which at most MAX_WINDOWS are used, evenly spaced. Raises ConfigError or
    CheckpointError if the model cannot be loaded.
    """
    config = VllmConfig(ModelConfig(str(folder), config_as_stored(folder), dtype=jnp.float32))
    mesh = make_mesh(1)
    with jax.set_mesh(mesh):
        model = load_model(config, mesh)
        every = RuleQuantizationConfig([QuantizationRule(".*", "int8")])
        weights = _weights_of(model, weight_schemes(folder, every))
        chosen = [windows[i] for i in np.linspace(0, len(windows) - 1, min(MAX_WINDOWS, len(windows))).astype(int)]
        steps = len(chosen) + len(weights)

        def done(step: int) -> None:
            if on_progress is not None:
                on_progress(step, steps)

        squares: dict[str, jax.Array] = {}
        for step, gradients in enumerate(_gradients(model, weights, chosen), 1):
            squares = {name: _add_square(squares.get(name), gradient) for name, gradient in gradients.items()}
            done(step)
        num_tokens = sum(map(len, chosen))
        modules: dict[str, list[str]] = {}
        for name in weights:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        result = []
        for step, (module, names) in enumerate(modules.items(), len(chosen) + 1):
            arrays = [(np.asarray(weights.pop(name)), np.asarray(squares.pop(name))) for name in names]
            known_as = checkpoint_names_of(model).name_in_checkpoint(module)
            result.append(module_sensitivity(known_as, arrays, rules, num_tokens))
            done(step)
        return result


def _weights_of(model: JaxModule, names: Container[str]) -> dict[str, jax.Array]:
    """Returns the parameters [..., out, in] of these modules by dotted name, each once."""
    found: dict[str, jax.Array] = {}
    for name, module in named_modules(model):
        if name in names and isinstance(module, JaxLinear | JaxEmbed | JaxExperts):
            for slot in module.weight_slots:
                found[f"{name}.{slot.name}"] = getattr(module, slot.name).get_value()
    return found


def _gradients(
    model: JaxModule, weights: Mapping[str, jax.Array], windows: Sequence[list[int]]
) -> Iterator[dict[str, jax.Array]]:
    """Yields, for each window, the gradients of the log-probability of tokens drawn from its predictions."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    index_of = {id(leaf): i for i, leaf in enumerate(leaves)}
    places = {name: index_of[id(weight)] for name, weight in weights.items()}

    def score(some: dict[str, jax.Array], others: list[jax.Array], ids: jax.Array, key: jax.Array) -> jax.Array:
        arrays = list(others)
        for name, weight in some.items():
            arrays[places[name]] = weight
        merged = nnx.merge(graph, jax.tree.unflatten(tree, arrays))
        return _log_probability_of_draws(cast(GenerativeModel, merged), ids, key)

    gradient = jax.jit(jax.grad(score))
    others = [jnp.zeros(0) if i in places.values() else leaf for i, leaf in enumerate(leaves)]
    for number, window in enumerate(windows):
        yield gradient(dict(weights), others, jnp.asarray(window, jnp.int32), jax.random.key(number))


def _log_probability_of_draws(model: GenerativeModel, ids: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the summed log-probability of one token for each position, drawn from the model's own predictions."""
    num_tokens = len(ids)
    _, hidden, _ = model(None, ids, AttentionMetadata.for_whole_sequences([num_tokens]))
    rows = _LOGITS_ROWS if num_tokens % _LOGITS_ROWS == 0 else num_tokens

    # The backward pass computes logits again: all of them together would be larger than the model.
    @jax.checkpoint
    def of_rows(hidden: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.compute_logits(hidden)
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        return jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=-1).sum()

    chunks = hidden.reshape(-1, rows, hidden.shape[-1])
    return jax.lax.map(lambda chunk: of_rows(*chunk), (chunks, jax.random.split(key, len(chunks)))).sum()


@jax.jit
def _add_square(total: jax.Array | None, gradient: jax.Array) -> jax.Array:
    return gradient * gradient if total is None else total + gradient * gradient


def module_sensitivity(
    name: str, arrays: Sequence[tuple[np.ndarray, np.ndarray]], rules: Sequence[QuantizationRule], num_tokens: int
) -> ModuleSensitivity:
    """Returns the cost of each rule for a module of these (weights [..., out, in], sums of squared gradients)."""
    options = []
    for rule in rules:
        scheme = weight_scheme(rule)
        assert scheme is not None
        try:
            for weight, _ in arrays:
                check_quantizable(weight.shape[-1], scheme)
        except ValueError:
            continue
        num_bytes, kl = 0, 0.0
        for weight, square in arrays:
            for part, importance in _row_blocks(weight, square):
                quantized = quantize(part, scheme)
                num_bytes += quantized.packed_nbytes
                error = np.asarray(dequantize(quantized, jnp.float32)) - part
                kl += float(np.vdot(importance, error * error)) / (2 * num_tokens)
        options.append(Option(rule, num_bytes, kl))
    return ModuleSensitivity(name, sum(weight.size for weight, _ in arrays), tuple(options))


def _row_blocks(*stacks: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields blocks of rows of each stack [..., out, in], as matrices of a moderate size."""
    matrices = [stack.reshape(-1, stack.shape[-1]) for stack in stacks]
    num_rows = max(1, _ROWS_AT_ONCE // matrices[0].shape[-1])
    for first in range(0, len(matrices[0]), num_rows):
        yield tuple(matrix[first : first + num_rows] for matrix in matrices)
