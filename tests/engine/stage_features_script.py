"""Compares what else an engine of pipeline stages does with one device: speculation, and the store of blocks.

`python -m tests.engine.stage_features_script FOLDER SIZES`, as `tests.engine.stages_script`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jaxis import LLM
from tests.engine.rank_features_script import check_store, draft_trials
from tests.engine.ranks_script import GREEDY
from tests.engine.stages_script import start
from tests.engine.test_same_answer import PROMPTS, SIMPLE, run, tokens
from tests.support.drafters import drafting


@contextlib.contextmanager
def drafts_in_flight(llm: LLM) -> Iterator[list[int]]:
    """After each step, how many of those in flight have drafts."""
    engine, numbers, step = llm.engine, [], llm.engine.step

    def noting() -> Any:
        done = step()
        numbers.append(sum(dispatched.output.has_drafts for dispatched in engine.steps))
        return done

    with mock.patch.object(engine, "step", noting):
        yield numbers


def check_drafts(llm: LLM, requests: list[Any], expected: list[Any]) -> None:
    """Drafts in several steps that are in flight together."""
    trials = draft_trials(llm, requests, expected)
    for drafter, asked in trials:
        with drafting(llm.engine, drafter, 4) as speculation, drafts_in_flight(llm) as numbers:
            assert tokens(run(llm, asked)) == expected, drafter
        if drafter is trials[0][0]:
            assert max(numbers) > 1
    assert speculation.counts.num_accepted_tokens > 0


def main(folder: str, sizes: str) -> None:
    with start(folder) as llm:
        block_bytes = sum(llm.engine.runner.kv_bytes_per_block.values())
        simple = tokens(run(llm, SIMPLE))
        alone = tokens(run(llm, [(PROMPTS[4], GREEDY)]))
    for size in sizes.split(","):
        stages, tensor = map(int, size.split("x"))
        store = {"kv_cache_memory": 20 * block_bytes * max(1, tensor // 2), "kv_offloading_size": 0.05}
        with start(folder, stages, tensor, **store) as llm:
            check_drafts(llm, SIMPLE, simple)
            check_store(llm, alone)
        print(size, "is as one device", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
