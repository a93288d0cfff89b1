"""Compares what else an engine of data ranks does with one device: speculation, the store of blocks, KV events.

`python -m tests.engine.rank_features_script FOLDER SIZES [ARGUMENTS]`, as `tests.engine.ranks_script`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from jaxis import LLM
from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.drafting.speculation import Drafter
from jaxis.engine.drafting.suffix import SuffixDrafter
from jaxis.engine.kv_events.event_format import block_hash
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from tests.engine.kv_events.test_publisher import TOPIC, reading, replay
from tests.engine.ranks_script import GREEDY, compare, quick_answers, start
from tests.engine.test_same_answer import MIXED, PROMPTS, SIMPLE, run, tokens
from tests.support.drafters import drafters, drafting, without_drafts

SHARED = PROMPTS[4]


@contextlib.contextmanager
def rows_of_ranks(llm: LLM) -> Iterator[list[list[int]]]:
    """How many rows each rank samples in each step."""
    rows: list[list[int]] = []
    forward = llm.engine.runner.forward

    def noting(output: SchedulerOutput) -> Any:
        rows.append([rank.num_rows for rank in output.ranks])
        return forward(output)

    with mock.patch.object(llm.engine.runner, "forward", noting):
        yield rows


def draft_trials(llm: LLM, requests: list[Any], expected: list[Any]) -> list[tuple[Drafter, list[Any]]]:
    """Drafters, some of whose drafts are right, and what to ask an engine that uses them; its answers are expected."""
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    for (prompt, _), completions in zip(requests, expected, strict=True):
        answers.setdefault(tuple(prompt), []).extend(completions)
    known = drafters(answers, llm.engine.runner.vocab_size)
    predicted = [
        (prompt, replace(params, prediction=completions[0]))
        for (prompt, params), completions in zip(requests, expected, strict=True)
    ]
    suffix = SuffixDrafter(8, 100, 2.0, 0.1)  # which knows the answers the second time
    return [(known["changing"], requests), (LookupDrafter(1, 4), predicted), (suffix, requests), (suffix, requests)]


def check_drafts(llm: LLM, requests: list[Any], expected: list[Any], kinds: str) -> None:
    """Drafts on ranks that have different numbers of them."""
    trials = draft_trials(llm, requests, expected)
    for drafter, asked in trials if kinds == "all" else trials[:2]:
        with drafting(llm.engine, drafter, 4) as speculation, rows_of_ranks(llm) as rows:
            assert tokens(run(llm, asked)) == expected, drafter
        assert any(len(set(each)) > 1 for each in rows)
    if llm.engine.runner.num_state_slots is None:  # recurrent states may be without drafts
        assert speculation.counts.num_accepted_tokens > 0


def check_store(llm: LLM, expected: list[Any]) -> None:
    """What one rank saved, another one loads; the tokens are those of one device."""
    engine = llm.engine
    store, ranks = engine.connector.store, engine.scheduler.ranks
    assert store is not None
    engine.reset_prefix_cache()
    # Prompts of six blocks take the places of everything else, and so do their states.
    num_held = max(ranks[0].block_manager.num_blocks // 6, engine.runner.num_state_slots or 0)
    with without_drafts(engine):
        assert tokens(run(llm, [(SHARED, GREEDY)])) == expected[:1]
        run(llm, [([i, *SHARED[1:]], GREEDY) for i in range((num_held + 1) * len(ranks))])
        before = [rank.block_manager.prefix_cache_hits for rank in ranks]
        loaded = store.stats["host"].loaded_blocks
        outputs = run(llm, [(SHARED, GREEDY)] * (2 * len(ranks)))
    assert tokens(outputs) == expected[:1] * (2 * len(ranks))
    hits = [rank.block_manager.prefix_cache_hits - old for rank, old in zip(ranks, before, strict=True)]
    assert min(hits) >= 96, hits
    assert store.stats["host"].loaded_blocks - loaded >= len(ranks)
    assert store.stats["host"].failed_blocks == 0


def check_disk(folder: str, expected: list[Any], *sizes: int, **arguments: Any) -> None:
    """Every rank of an engine finds what those of one before it wrote."""
    for num_cached in (0, 96):
        with start(folder, *sizes, **arguments) as llm:
            outputs = run(llm, [(SHARED, GREEDY)] * (2 * len(llm.engine.scheduler.ranks)))
            assert tokens(outputs) == expected[:1] * len(outputs)
            assert min(output.num_cached_tokens or 0 for output in outputs) == num_cached


def check_events(llm: LLM, folder: str) -> None:
    """A reader of each rank's events knows the blocks that can be found there."""
    for number, rank in enumerate(llm.engine.scheduler.ranks):
        suffix = f"_dp{number}" if number else ""
        blocks: set[tuple[int, int]] = set()
        with reading(f"ipc://{folder}/events{suffix}", f"ipc://{folder}/replay{suffix}") as (_, replays):
            batches = replay(replays, 0)
        for _, (_, events, of_rank) in batches:
            assert of_rank == number
            for event in events:
                keys = {(event.get("group_idx"), name) for name in event.get("block_hashes", ())}
                if event["type"] == "AllBlocksCleared":
                    blocks.clear()
                elif event["type"] == "BlockStored":
                    blocks |= keys
                else:
                    assert keys <= blocks
                    blocks -= keys
        pools = enumerate(rank.block_manager.pools)
        assert blocks == {
            (group, block_hash(digest)) for group, pool in pools for digest, _ in pool.registered_blocks()
        }
        assert blocks


def main(folder: str, sizes: str, arguments: str = "{}", kinds: str = "quick") -> None:
    given = json.loads(arguments)
    requests = SIMPLE if kinds == "quick" else [*SIMPLE, *MIXED]
    with start(folder, **given) as llm:
        answers = quick_answers(llm)
        expected = answers["simple"] if kinds == "quick" else tokens(run(llm, requests))
        block_bytes = sum(llm.engine.runner.kv_bytes_per_block.values())
    for size in sizes.split(","):
        data, tensor = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as sockets:
            features = {
                "speculative_config": {"method": "ngram"},
                "kv_offloading_size": 0.05,
                "kv_events_config": {
                    "enable_kv_cache_events": True,
                    "endpoint": f"ipc://{sockets}/events",
                    "replay_endpoint": f"ipc://{sockets}/replay",
                    "topic": TOPIC.decode(),
                },
                "max_model_len": 128,
                "kv_cache_memory": 20 * block_bytes * data * max(1, tensor // 2),
            }
            with start(folder, data, tensor, **given | features) as llm:
                with without_drafts(llm.engine):
                    compare(quick_answers(llm), answers)
                check_drafts(llm, requests, expected, kinds)
                check_store(llm, answers["alone"])
                check_events(llm, sockets)
            if kinds == "all":
                offloading = {"kv_offloading_size": 0.05, "kv_offloading_dir": f"{sockets}/blocks"}
                check_disk(folder, answers["alone"], data, tensor, **given | offloading)
        print(size, "is as one device", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
