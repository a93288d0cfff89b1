"""Windows of ids and hashes of n-grams against transformers' and against Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxis.kernels.state_slots import StateSlots
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.ngram_hash import NgramHash, TokenWindow

END = 3


def transformers_window(ids, size):
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding as Reference

    class Shift(torch.nn.Module):
        eos_token_id = END

    history = torch.tensor([[END] * (size - 1) + list(ids)])
    shifted = [Reference._shift_right_ignore_eos(Shift(), history, shift)[0, size - 1 :] for shift in range(size)]
    return torch.stack(shifted, dim=1).numpy()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_windows_equal_transformers_in_any_steps(size):
    rng = np.random.default_rng(size)
    window = TokenWindow(size, filler=END, ends=END)
    sequences = [rng.integers(0, 6, length).astype(np.int32) for length in (1, 2, 23, 40)]
    whole = window(None, jnp.asarray(np.concatenate(sequences)), AttentionMetadata.for_whole_sequences([1, 2, 23, 40]))
    expected = [transformers_window(ids, size) for ids in sequences]
    np.testing.assert_array_equal(whole[1], np.concatenate(expected))
    step = jax.jit(window)
    for chunk in (1, 2, 7):
        state = jnp.full((5, size - 1, 1), 99, jnp.int32)
        for start in range(0, 40, chunk):
            parts = [ids[start : start + chunk] for ids in sequences]
            reads = [-1 if start == 0 else slot for slot in range(4)]
            kept = [-1, -1, -1, 4]
            slots = StateSlots(*(jnp.asarray(x, jnp.int32) for x in (reads, range(4), kept, [1] * 4)))
            starts = jnp.asarray(np.cumsum([0, *map(len, parts)]), jnp.int32)
            metadata = AttentionMetadata(starts, None, starts, starts, jnp.array([0, 0, 4]), state_slots=slots)
            state, out = step(state, jnp.asarray(np.concatenate([*parts, [5, 5]]).astype(np.int32)), metadata)
            wanted = [each[start : start + chunk] for each in expected]
            np.testing.assert_array_equal(out[:-2], np.concatenate(wanted))
            # The state after one token of the last sequence is kept, too: a draft that is taken back goes on from it.
            earlier = [0] * (size - 1) + [i + 1 for i in sequences[3][: start + 1]]
            np.testing.assert_array_equal(state[4, :, 0], earlier[-(size - 1) :])


def test_a_window_without_ends_sees_all_ids():
    ids = jnp.array([5, 4, 5, 5], jnp.int32)
    _, out = TokenWindow(3, filler=2)(None, ids, AttentionMetadata.for_whole_sequences([3, 1]))
    np.testing.assert_array_equal(out, [[5, 2, 2], [4, 5, 2], [5, 4, 5], [5, 2, 2]])


@pytest.mark.parametrize("combine", ["xor", "sum"])
def test_hashes_equal_those_of_integers_of_any_size(combine):
    rng = np.random.default_rng(7)
    for case in range(12):
        size, heads = int(rng.integers(2, 5)), int(rng.integers(1, 17))
        largest = (2**64 - 1) // size // 250_000
        factors = tuple(tuple(int(rng.integers(0, largest + 1)) for _ in range(size)) for _ in range(heads))
        bits = int(rng.integers(2, 32))
        moduli = (*(int(rng.integers(1, 2**bits)) for _ in range(heads - 1)), 2 ** min(bits, 31) - 1)
        offsets = tuple(int(rng.integers(0, 2**31 - max(moduli) + 1)) for _ in range(heads))
        window = rng.integers(0, 250_000, (33, size)).astype(np.int32)
        rows = np.asarray(jax.jit(NgramHash(factors, moduli, offsets, combine))(window))
        for t, ids in enumerate(window.tolist()):
            for head in range(heads):
                products = [i * f for i, f in zip(ids, factors[head], strict=True)]
                total = sum(products) if combine == "sum" else int(np.bitwise_xor.reduce(np.array(products, np.uint64)))
                assert rows[t, head] == total % moduli[head] + offsets[head], (case, t, head)
