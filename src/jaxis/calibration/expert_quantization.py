"""Quantization of the experts of a mixture, each for the tokens that go to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxis.calibration.calibrated_weight import InputStatistics
from jaxis.layers.experts import JaxExperts

_MIN_TOKENS = 64
"""Smallest number of an expert's tokens; with fewer, it is quantized without them."""

QuantizeExpert = Callable[[str, int, np.ndarray, InputStatistics | None], np.ndarray]
"""Function of stack, expert, weight [out, in] and input statistics (or None) that quantizes and dequantizes the weight,
float32 [out, in]."""


def quantize_experts(experts: JaxExperts, calls: Sequence[tuple[np.ndarray, ...]], quantize: QuantizeExpert) -> None:
    """Quantizes one expert after another, and gives the module the resulting weights.

    An expert's down projection is quantized for the outputs of its quantized gate and up projections. A token counts by
    the square of its weight for the expert, as its errors do in the output.

    The module has float32 stacks. `calls` are its arguments for each sequence: x [T, E], expert ids [T, k], weights [T,
    k].
    """
    x, expert_ids, expert_weights = (np.concatenate(arrays) for arrays in zip(*calls, strict=True))
    stacks = {name: np.array(getattr(experts, name).get_value(), np.float32) for name in experts.stack_names}
    for expert in range(experts.num_experts):
        tokens, place = np.nonzero(expert_ids == expert)
        shares = expert_weights[tokens, place][:, None]
        rows, shares = (x[tokens] * shares, np.ones_like(shares)) if experts.scales_input else (x[tokens], shares)
        is_known = len(tokens) >= _MIN_TOKENS
        statistics = _statistics(rows * shares) if is_known else None
        inner = [name for name in experts.stack_names if name != "down_proj"]
        for name in inner:
            stacks[name][expert] = quantize(name, expert, stacks[name][expert], statistics)
        if is_known:
            products = {
                name: jnp.asarray(_projected(experts, name, expert, rows, stacks[name][expert])) for name in inner
            }
            hidden = np.asarray(experts.gated_unit(products.get("gate_proj"), products["up_proj"]))
            statistics = _statistics(hidden * shares)
        stacks["down_proj"][expert] = quantize("down_proj", expert, stacks["down_proj"][expert], statistics)
    for name, stack in stacks.items():
        getattr(experts, name).set_value(jnp.asarray(stack))


def _statistics(rows: np.ndarray) -> InputStatistics:
    return InputStatistics.of(rows.T @ rows / len(rows))


def _projected(experts: JaxExperts, name: str, expert: int, rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Applies one expert's projection: rows [T, in] -> [T, out]."""
    bias = getattr(experts, f"{name}_bias")
    return rows @ weight.T + (0 if bias is None else np.asarray(bias[...][expert], np.float32))
