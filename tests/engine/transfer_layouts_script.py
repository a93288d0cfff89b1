"""Hands prompts over between engines with other devices: `python -m tests.engine.transfer_layouts_script FOLDER PAIRS`.

PAIRS are producer-consumer, each data x tensor, such as 1x2-1x4,1x4-2x1. A process of its own, for its devices.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine import setup
from jaxis.kernels import native
from tests.engine.test_kv_transfer import GREEDY, decode, num_leases, prefill, prompt

LENGTHS = (97,)
LIBRARY = native.library()


@contextlib.contextmanager
def engine(folder: str, sizes: str, role: str | None = None, *, is_native: bool = False) -> Iterator[LLM]:
    """An engine of so many ranks and devices; a dense model may have ranks, as the smallest one to test."""
    data, tensor = map(int, sizes.split("x"))
    arguments: dict[str, Any] = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    if role is not None:
        arguments["kv_transfer_config"] = {"kv_role": role, "kv_port": 0}
    library = LIBRARY if is_native else None
    with (
        mock.patch.object(setup, "check_ranks_share"),
        mock.patch.object(native, "library", return_value=library),
        LLM(
            folder,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            kv_cache_memory="8MiB",
            show_progress=False,
            **arguments,
        ) as llm,
    ):
        yield llm


def check_all_is_found(folder: str, producer_sizes: str, consumer_sizes: str) -> None:
    """What one engine has computed is found by the other, whose answer is its own."""
    with (
        engine(folder, producer_sizes, "kv_producer") as producer,
        engine(folder, consumer_sizes, "kv_consumer") as consumer,
    ):
        prompts = [prompt(length, length) for length in LENGTHS]
        for tokens, params in zip(prompts, prefill(producer, *prompts), strict=True):
            (token_ids, logprobs), found = decode(consumer, tokens, params)
            assert found == (len(tokens) - 1) // 16 * 16, (producer_sizes, consumer_sizes)
            consumer.engine.reset_prefix_cache()
            (expected_ids, expected), found = decode(consumer, tokens)
            assert found == 0
            assert token_ids == expected_ids
            for entry, of_one in zip(logprobs, expected, strict=True):
                assert entry == pytest.approx(of_one, abs=1e-4)
        assert num_leases(producer) == num_leases(consumer) == 0
    print(f"{producer_sizes}-{consumer_sizes} is found")


def check_native_takes_nothing(folder: str, sizes: str) -> None:
    """An engine that promises bits takes no blocks of one that does not, nor the other way round."""
    for first, second in ((sizes, "1x1"), ("1x1", sizes)):
        with (
            engine(folder, first, "kv_producer", is_native=True) as producer,
            engine(folder, second, "kv_consumer", is_native=True) as consumer,
        ):
            [params] = prefill(producer, prompt(0))
            assert params is not None
            output = consumer.generate(
                [prompt(0)], SamplingParams(**GREEDY, extra_args={"kv_transfer_params": params})
            )[0]
            assert output.num_cached_tokens == 0
            assert consumer.engine.connector.stats["peer"].failed_blocks > 0
    print("native is refused")


def main(folder: str, pairs: str) -> None:
    for pair in pairs.split(","):
        if pair.startswith("native-"):
            check_native_takes_nothing(folder, pair.removeprefix("native-"))
        else:
            check_all_is_found(folder, *pair.split("-"))


if __name__ == "__main__":
    main(*sys.argv[1:])
