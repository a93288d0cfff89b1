"""Conversations on an engine whose KV cache has few blocks, beside one that remembers nothing."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

SYSTEM = [7, 8, 9, 10] * 8
MAX_LEN = 128


def converse(folder: str, num_turns: int, cache: str, **arguments: Any) -> dict[str, Any]:
    """Compares every turn's log-probabilities, in hex, with those of an engine without any prefix cache.

    Args:
      folder: The checkpoint.
      num_turns: Number of turns of all conversations together.
      cache: Memory of the small KV cache.
      arguments: Arguments of the engines.

    Returns:
      How many turns, of these how many differ, and what was found where.
    """
    from jaxis import LLM, SamplingParams

    rng = random.Random(0)
    arguments = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": MAX_LEN, **arguments}
    arguments |= {"show_progress": False}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
    conversations = [list(SYSTEM) for _ in range(10)]
    found: dict[str, Any] = {"turns": 0, "different": 0, "other tokens": 0, "largest difference": 0.0, "cached": 0}
    with (
        LLM(folder, kv_cache_memory="16MiB", enable_prefix_caching=False, **arguments) as plain,
        LLM(folder, kv_cache_memory=cache, kv_offloading_size=0.05, **arguments) as small,
    ):
        limit = small.engine.max_model_len - 24
        found["blocks"] = list(small.engine.runner.num_blocks.values())
        while found["turns"] < num_turns:
            turns = rng.sample(conversations, rng.randint(1, 3))
            for tokens in turns:
                if len(tokens) > limit:
                    tokens[:] = SYSTEM[: rng.choice([16, 32])]
                tokens += [rng.randrange(1, 100) for _ in range(rng.randint(1, 12))]
            prompts = [{"prompt_token_ids": list(tokens)} for tokens in turns]
            outputs = small.generate(prompts, params)
            expected = plain.generate(prompts, params)
            for tokens, output, other in zip(turns, outputs, expected, strict=True):
                found["turns"] += 1
                found["different"] += _logprobs(output) != _logprobs(other)
                found["other tokens"] += output.outputs[0].token_ids != other.outputs[0].token_ids
                found["largest difference"] = max(found["largest difference"], _difference(output, other))
                found["cached"] += output.num_cached_tokens
                tokens += output.outputs[0].token_ids
        found |= {f"host {name}": value for name, value in vars(small.engine.connector.store.stats["host"]).items()}
    return found


def _logprobs(output: Any) -> list[dict[int, str]]:
    return [{token: value.logprob.hex() for token, value in entry.items()} for entry in output.outputs[0].logprobs]


def _difference(output: Any, other: Any) -> float:
    """The largest between log-probabilities of the sampled tokens."""
    pairs = zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
    sampled = zip(pairs, output.outputs[0].token_ids, strict=True)
    return max(abs(mine[token].logprob - its[token].logprob) for (mine, its), token in sampled if token in its)


def main(num_turns: str, *rows: str) -> None:
    """Prints, as JSON, what was found for each row: a family's name, memory for its cache, its type."""
    from tests.support import parity

    families = {family.name: family for family in parity.FAMILIES}
    found = {}
    for row in rows:
        name, cache, dtype = row.split("|")
        folder = parity.checkpoint_folder(families[name])
        found[row] = converse(folder, int(num_turns), cache, dtype="float32", kv_cache_dtype=dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
