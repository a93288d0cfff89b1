"""Hashes of the last n token ids, which choose rows of a table of n-grams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.token_window import earlier_rows, kept_rows
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.state_cache_spec import StateArray

_U32 = jnp.uint32
Words = tuple[jax.Array, jax.Array]
"""Unsigned integers of 64 bits as their high and low halves, uint32: programs have no larger integers."""


@dataclass(frozen=True)
class NgramHash:
    """Row numbers of H heads: `(sum_d or xor_d id[t - d] * multipliers[h][d]) mod moduli[h] + offsets[h]`.

    Attributes:
      multipliers: H sequences of n numbers; 0 where a head does not see as far back. A product with an id, and a sum of
        n of them, must be below 2**64.
      moduli: H numbers below 2**31.
      offsets: H numbers; the sum with a modulus must be at most 2**31.
      combine: Operation that combines the products.
    """

    multipliers: tuple[tuple[int, ...], ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    combine: Literal["xor", "sum"] = "xor"

    @classmethod
    def of_orders(cls, multipliers: Sequence[int], heads_per_order: int, smallest: int, number: int) -> NgramHash:
        """Returns the hash of 2, 3, ... ids, as many as there are multipliers, with several heads each.

        The moduli are consecutive primes from `smallest` on, after those of `number` other such hashes.
        """
        num_heads = (len(multipliers) - 1) * heads_per_order
        primes = (n for n in count(max(smallest, 2)) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
        moduli = tuple(islice(primes, number * num_heads, (number + 1) * num_heads))
        seen = (n for n in range(2, len(multipliers) + 1) for _ in range(heads_per_order))
        factors = tuple((*multipliers[:n], *[0] * (len(multipliers) - n)) for n in seen)
        return cls(factors, moduli, (0, *accumulate(moduli[:-1])))

    def __call__(self, window: jax.Array) -> jax.Array:
        """Returns rows i32 [T, H] for a window i32 [T, n] of ids, the token's own first."""
        total: Words | None = None
        for distance, factors in enumerate(zip(*self.multipliers, strict=True)):
            product = _product(window[:, distance, None].astype(_U32), factors)
            total = (
                product if total is None else _xor(total, product) if self.combine == "xor" else _sum(total, product)
            )
        assert total is not None
        return (_remainder(total, self.moduli) + np.array(self.offsets, np.uint32)).astype(jnp.int32)


@dataclass(frozen=True)
class TokenWindow:
    """The last n ids of each token's sequence, which a state continues from step to step.

    Attributes:
      size: n, at least 2.
      filler: Id in place of those before the sequence's beginning.
      ends: Id of which later tokens see the filler, as of all before it; None for none.
    """

    size: int
    filler: int
    ends: int | None = None

    @property
    def state_array(self) -> StateArray:
        return StateArray((self.size - 1, 1), (None, None), np.int32)

    def __call__(
        self, state: jax.Array | None, ids: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """Returns the updated state and windows i32 [T, n], the token's own id first, for ids i32 [T]."""
        # A state of zeros is a sequence's beginning.
        rows = (ids + 1)[:, None]
        slots = None if state is None else metadata.state_slots
        requests = metadata.query_start_loc, metadata.request_distribution[2]
        distances = range(1, self.size)
        window, is_beyond = [ids], jnp.zeros(ids.shape, bool)
        for earlier in earlier_rows(rows, state, slots, *requests, distances):
            before = jnp.where(earlier[:, 0] == 0, self.filler, earlier[:, 0] - 1)
            if self.ends is not None:
                is_beyond |= before == self.ends
                before = jnp.where(is_beyond, self.filler, before)
            window.append(before)
        if state is not None and slots is not None:
            state = kept_rows(rows, state, slots, *requests)
        return state, jnp.stack(window, axis=1)


def _product(ids: jax.Array, factors: Sequence[int]) -> Words:
    """Returns ids uint32 [T, 1] times H factors below 2**64, modulo 2**64."""
    high = np.array([factor >> 32 for factor in factors], np.uint32)
    low = np.array([factor & 0xFFFFFFFF for factor in factors], np.uint32)
    # The low half's product in 64 bits, from products of 16 bits.
    first, second = ids & 0xFFFF, ids >> 16
    middle = second * (low & 0xFFFF) + (first * (low & 0xFFFF) >> 16)
    crossed = (middle & 0xFFFF) + first * (low >> 16)
    return ids * high + second * (low >> 16) + (middle >> 16) + (crossed >> 16), ids * low


def _xor(a: Words, b: Words) -> Words:
    return a[0] ^ b[0], a[1] ^ b[1]


def _sum(a: Words, b: Words) -> Words:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(_U32), low


def _remainder(words: Words, moduli: Sequence[int]) -> jax.Array:
    """Returns words [T, H] modulo numbers below 2**31, by long division in digits of as many bits as fit."""
    divisor = np.array(moduli, np.uint32)
    digit = 32 - max(moduli).bit_length()
    remainder = words[0] % divisor
    for end in range(32, 0, -digit):
        bits = min(digit, end)
        remainder = ((remainder << bits) | ((words[1] >> (end - bits)) & ((1 << bits) - 1))) % divisor
    return remainder
