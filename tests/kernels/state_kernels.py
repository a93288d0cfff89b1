"""Kernels with a state, with random inputs and transformers' torch code as their oracle, and steps for them.

The oracles import their code: scripts that use the rest need not wait seconds for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.causal_conv import ConvOperands, causal_conv
from jaxis.kernels.delta_rule import DeltaRuleOperands, gated_delta_rule
from jaxis.kernels.selective_scan import ScanOperands, selective_scan
from jaxis.kernels.ssd import SsdOperands, ssd
from jaxis.kernels.state_slots import RecurrentStates, StateSlots

if TYPE_CHECKING:
    import torch

EPSILON = 1e-6  # of transformers' L2 norms
Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StateKernel:
    """A kernel of fixed sizes.

    Attributes:
      state_shape: Shape of one slot.
      make_inputs: From T and a random generator to arrays [T, ...].
      call: From inputs, state, slots, query_start_loc and num_requests to state and output.
      oracle: From tensors [1, T, ...], the inputs of one request, and its state [1, ...] to its output and its state.
      dtype: Type of the state.
    """

    state_shape: tuple[int, ...]
    make_inputs: Callable[[int, np.random.Generator], Arrays]
    call: Callable[..., tuple[jax.Array | None, jax.Array]]
    oracle: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    dtype: Any = np.float32

    def run(
        self, inputs: Arrays, state: Any, step: StateStep | None, lengths: list[int], program: Any = None
    ) -> tuple[Any, np.ndarray]:
        """The kernel in a program of its own, or in one from `jitted`; without a step, on whole sequences."""
        slots = None if step is None else step.slots
        starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        program = program or self.jitted()
        state, out = program(inputs, state, slots, starts, jnp.int32(len(lengths) if step is None else step.num))
        return None if state is None else np.asarray(state), np.asarray(out)

    def jitted(self, **options: Any) -> Any:
        """A new program: what was traced before may be of another instruction set."""
        return jax.jit(lambda *args: self.call(*args), **options)

    def expected(self, inputs: Arrays, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The oracle's output and final state for one request."""
        import torch

        tensors = [torch.tensor(np.asarray(x, np.float32))[None] for x in inputs]
        out, state = self.oracle(tensors, torch.tensor(np.asarray(state, np.float32))[None])
        return out[0].numpy(), state[0].numpy()


@dataclasses.dataclass(frozen=True)
class StateStep:
    """A step: of each request the tokens, and the slots it reads, writes, keeps to, and after how many tokens."""

    requests: tuple[tuple[int, int, int, int, int], ...]
    pad_requests: int = 0

    @property
    def num(self) -> int:
        return len(self.requests)

    @property
    def lengths(self) -> list[int]:
        return [request[0] for request in self.requests] + [0] * self.pad_requests

    @property
    def slots(self) -> StateSlots:
        # Of requests that are padding, slots that the kernel may not touch.
        rows = [request[1:] for request in self.requests] + [(UNTOUCHED, UNTOUCHED, UNTOUCHED, 1)] * self.pad_requests
        return StateSlots(*(jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)))


NUM_SLOTS, UNTOUCHED = 12, 9
MIX = StateStep(
    (
        (1, 0, 0, -1, 0),  # a decode in place
        (7, -1, 1, -1, 0),  # a beginning
        (1, 2, 3, 4, 1),  # a decode whose state is kept too
        (11, 2, 5, 6, 3),  # two that read one slot; a state is kept in the middle
        (0, UNTOUCHED, 7, -1, 0),  # no tokens
        (2, -1, 8, 10, 2),
        (3, 11, 11, -1, 0),  # in place
    ),
    pad_requests=2,
)
PAD_TOKENS = 4


def delta_rule_kernel(
    key_heads: int, heads: int, key_dim: int, value_dim: int, *, by_channel: bool = False
) -> StateKernel:
    def make_inputs(num_tokens: int, rng: np.random.Generator) -> Arrays:
        shape = (num_tokens, heads, key_dim) if by_channel else (num_tokens, heads)
        return (
            *(rng.normal(size=(num_tokens, key_heads, key_dim)).astype(np.float32) for _ in range(2)),
            rng.normal(size=(num_tokens, heads, value_dim)).astype(np.float32),
            -rng.exponential(size=shape).astype(np.float32),
            rng.uniform(size=(num_tokens, heads)).astype(np.float32),
        )

    def call(inputs: Arrays, *step: Any) -> tuple[jax.Array | None, jax.Array]:
        operands = DeltaRuleOperands(*inputs, RecurrentStates(*step))
        return gated_delta_rule(operands, l2_norm_epsilon=EPSILON, scale=key_dim**-0.5)

    def oracle(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        q, k, v, decay, beta = inputs
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        if not by_channel:
            return torch_chunk_gated_delta_rule(q, k, v, decay, beta, initial_state=state, **options)
        q, k = (x.repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
        return recurrent_kimi_delta_attention(q, k, v, decay, beta, initial_state=state, **options)

    return StateKernel((heads, key_dim, value_dim), make_inputs, call, oracle)


def ssd_kernel(heads: int, groups: int, head_dim: int, state_size: int, *, has_d: bool = True) -> StateKernel:
    rng = np.random.default_rng(1)
    a = -np.exp(rng.normal(size=heads)).astype(np.float32)
    d = rng.normal(size=heads).astype(np.float32) if has_d else None

    def make_inputs(num_tokens: int, rng: np.random.Generator) -> Arrays:
        return (
            rng.normal(size=(num_tokens, heads, head_dim)).astype(np.float32),
            np.log1p(np.exp(rng.normal(size=(num_tokens, heads)))).astype(np.float32),
            *(rng.normal(size=(num_tokens, groups, state_size)).astype(np.float32) for _ in range(2)),
        )

    def call(inputs: Arrays, *step: Any) -> tuple[jax.Array | None, jax.Array]:
        x, dt, b, c = inputs
        skip = None if d is None else jnp.asarray(d)
        return ssd(SsdOperands(x, dt, jnp.asarray(a), b, c, skip, RecurrentStates(*step)))

    def oracle(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        x, dt, b, c = inputs
        skip = None if d is None else torch.tensor(d)
        return mamba2_chunk_scan(
            x, dt, torch.tensor(a), b, c, chunk_size=5, D=skip, initial_states=state, return_final_states=True
        )

    return StateKernel((heads, head_dim, state_size), make_inputs, call, oracle)


def scan_kernel(channels: int, state_size: int) -> StateKernel:
    rng = np.random.default_rng(1)
    a = -np.exp(rng.normal(size=(channels, state_size))).astype(np.float32)
    d = rng.normal(size=channels).astype(np.float32)

    def make_inputs(num_tokens: int, rng: np.random.Generator) -> Arrays:
        return (
            rng.normal(size=(num_tokens, channels)).astype(np.float32),
            np.log1p(np.exp(rng.normal(size=(num_tokens, channels)))).astype(np.float32),
            *(rng.normal(size=(num_tokens, state_size)).astype(np.float32) for _ in range(2)),
        )

    def call(inputs: Arrays, *step: Any) -> tuple[jax.Array | None, jax.Array]:
        x, dt, b, c = inputs
        return selective_scan(ScanOperands(x, dt, jnp.asarray(a), b, c, jnp.asarray(d), RecurrentStates(*step)))

    def oracle(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch
        from transformers.models.jamba.modeling_jamba import mamba_selective_state_update

        state = state.mT.clone()
        tokens = zip(*(x.unbind(1) for x in inputs), strict=True)
        y = [
            mamba_selective_state_update(state, x, dt, torch.tensor(a), b, c, torch.tensor(d)) for x, dt, b, c in tokens
        ]
        return torch.stack(y, 1), state.mT

    return StateKernel((state_size, channels), make_inputs, call, oracle)


def conv_kernel(
    channels: int, width: int, *, bias: bool, activation: str | None, dtype: Any = np.float32, dilation: int = 1
) -> StateKernel:
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(channels, width)).astype(np.float32)
    offset = rng.normal(size=channels).astype(np.float32) if bias else None

    def make_inputs(num_tokens: int, rng: np.random.Generator) -> Arrays:
        return (rng.normal(size=(num_tokens, channels)).astype(dtype),)

    def call(inputs: Arrays, *step: Any) -> tuple[jax.Array | None, jax.Array]:
        b = None if offset is None else jnp.asarray(offset)
        operands = ConvOperands(*inputs, jnp.asarray(weight), b, RecurrentStates(*step))
        return causal_conv(operands, activation=activation, dilation=dilation)

    def oracle(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch
        from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_update

        x, state = inputs[0].mT, state.mT.clone()
        b = None if offset is None else torch.tensor(offset)
        if dilation > 1:
            x = torch.cat([state, x], dim=-1)
            y = torch.nn.functional.conv1d(x, torch.tensor(weight)[:, None], b, dilation=dilation, groups=channels)
            return y.mT, x[..., -state.shape[-1] :].mT
        y = causal_conv1d_update(x, state, torch.tensor(weight), b, activation)
        return y.mT, state.mT

    return StateKernel(((width - 1) * dilation, channels), make_inputs, call, oracle, dtype)


KERNELS: dict[str, StateKernel] = {
    "delta rule, 2 heads a key": delta_rule_kernel(2, 4, 16, 24),
    "delta rule, 3 heads a key": delta_rule_kernel(1, 3, 24, 40),
    "delta rule, by channel": delta_rule_kernel(2, 2, 20, 33, by_channel=True),
    "delta rule, by channel, 3 heads a key": delta_rule_kernel(1, 3, 32, 16, by_channel=True),
    "ssd, 1 group": ssd_kernel(3, 1, 21, 24),
    "ssd, 2 groups": ssd_kernel(4, 2, 16, 32, has_d=False),
    "selective scan": scan_kernel(70, 16),
    "conv of 4": conv_kernel(40, 4, bias=True, activation="silu"),
    "conv of 3": conv_kernel(21, 3, bias=False, activation=None),
    "conv of 7, bfloat16": conv_kernel(48, 7, bias=True, activation="silu", dtype=jnp.bfloat16),
    "conv of 4, dilated": conv_kernel(32, 4, bias=False, activation=None, dilation=3),
}

OFTEN = ("delta rule, 3 heads a key", "delta rule, by channel", "ssd, 2 groups", "selective scan", "conv of 4")


def each_kernel(names: Iterable[str] = KERNELS, often: Iterable[str] = OFTEN) -> pytest.MarkDecorator:
    """Runs a test on these kernels; on those that are not `often`, only with the slow tests."""
    often = set(often)
    return pytest.mark.parametrize(
        "name", [name if name in often else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


def _tolerance(kernel: StateKernel) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 2e-2} if kernel.dtype == jnp.bfloat16 else {"rtol": 1e-4, "atol": 5e-5}


def check_step(kernel: StateKernel, step: StateStep) -> None:
    """The outputs and every slot after a step are the oracle's; padding and other slots are as they should be."""
    rng = np.random.default_rng(0)
    inputs = kernel.make_inputs(sum(step.lengths) + PAD_TOKENS, rng)
    for x in inputs:
        x[-PAD_TOKENS:] = np.nan  # must not be read, or not matter
    state = rng.normal(size=(NUM_SLOTS, *kernel.state_shape)).astype(kernel.dtype)
    after, out = kernel.run(inputs, state, step, step.lengths)
    untouched = set(range(NUM_SLOTS))
    starts = np.cumsum([0, *step.lengths])
    for (length, read, write, keep, keep_after), start in zip(step.requests, starts, strict=False):
        if length == 0:
            continue
        own = [x[start : start + length] for x in inputs]
        initial = np.zeros_like(state[0]) if read < 0 else state[read]
        expected, final = kernel.expected(own, initial)
        np.testing.assert_allclose(out[start : start + length].astype(np.float32), expected, **_tolerance(kernel))
        np.testing.assert_allclose(after[write].astype(np.float32), final, **_tolerance(kernel))
        untouched -= {write, keep}
        if keep >= 0:
            _, kept = kernel.expected([x[:keep_after] for x in own], initial)
            np.testing.assert_allclose(after[keep].astype(np.float32), kept, **_tolerance(kernel))
    assert out.dtype == inputs[0].dtype
    np.testing.assert_array_equal(out[-PAD_TOKENS:].astype(np.float32), 0)
    assert UNTOUCHED in untouched
    for slot in untouched:
        np.testing.assert_array_equal(after[slot], state[slot])


def check_whole_sequences(kernel: StateKernel, lengths: list[int]) -> None:
    """Without a state, the outputs are the oracle's from zeros."""
    inputs = kernel.make_inputs(sum(lengths), np.random.default_rng(1))
    state, out = kernel.run(inputs, None, None, lengths)
    assert state is None
    for length, start in zip(lengths, np.cumsum([0, *lengths]), strict=False):
        rows = slice(start, start + length)
        expected, _ = kernel.expected([x[rows] for x in inputs], np.zeros(kernel.state_shape))
        np.testing.assert_allclose(out[rows].astype(np.float32), expected, **_tolerance(kernel))
