"""Blocks by hand: small cases whose answer can be counted on paper. Blocks hold 4 tokens."""

from __future__ import annotations

import itertools

import pytest

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.sequence import BlockTable, Sequence, SequenceId
from jaxis.errors import ConfigError
from jaxis.sampling_params import SamplingParams

ARRIVALS = itertools.count()
WINDOW = AttentionSpan(5)


def make_sequence(prompt: list[int], cache_salt: str | None = None, prompt_logprobs: int | None = None) -> Sequence:
    arrival = next(ARRIVALS)
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Sequence(
        SequenceId(str(arrival)), prompt, params, frozenset(), len(prompt) + 16, arrival=arrival, cache_salt=cache_salt
    )


def compute(manager: BlockManager, sequence: Sequence) -> Sequence:
    """Admits the sequence and computes its prompt."""
    assert manager.admit(sequence, manager.get_cached_prefix(sequence), sequence.num_tokens, 64)
    sequence.num_computed_tokens = sequence.num_tokens
    manager.cache_full_blocks(sequence)
    return sequence


def block_ids(sequence: Sequence) -> list[int]:
    return list(sequence.block_tables[0].block_ids) if sequence.block_tables else []


def cached_block_ids(manager: BlockManager, prompt: list[int]) -> list[int]:
    return list(manager.get_cached_prefix(make_sequence(prompt)).block_tables[0].block_ids)


def count_cached_blocks(manager: BlockManager, prompt: list[int], cache_salt: str | None = None) -> int:
    return manager.get_cached_prefix(make_sequence(prompt, cache_salt)).num_blocks


def test_allocation_takes_just_the_blocks_that_cover_the_tokens() -> None:
    manager = BlockManager({FULL_CONTEXT: 4}, block_size=4)
    sequence = make_sequence(list(range(16)))
    assert manager.allocate(sequence, 5)
    assert len(block_ids(sequence)) == 2
    assert manager.allocate(sequence, 8)
    assert len(block_ids(sequence)) == 2
    assert manager.allocate(sequence, 9)
    assert len(set(block_ids(sequence))) == 3
    assert manager.num_free_blocks == 1
    assert manager.usage == 0.75


def test_allocation_is_all_or_nothing() -> None:
    manager = BlockManager({FULL_CONTEXT: 3}, block_size=4)
    first, second = make_sequence(list(range(8))), make_sequence(list(range(8)))
    assert manager.allocate(first, 8)
    assert not manager.allocate(second, 8)
    assert block_ids(second) == []
    assert manager.num_free_blocks == 1
    assert manager.allocate(second, 4)


def test_cached_blocks_that_are_free_do_not_count_as_room_for_the_rest() -> None:
    manager = BlockManager({FULL_CONTEXT: 3}, block_size=4)
    manager.free(compute(manager, make_sequence(list(range(8)))))
    sequence = make_sequence(list(range(16)))
    prefix = manager.get_cached_prefix(sequence)
    assert prefix.num_blocks == 2
    assert not manager.admit(sequence, prefix, 16, 64)
    assert manager.num_free_blocks == 3
    assert count_cached_blocks(manager, list(range(16))) == 2
    shorter = make_sequence(list(range(12)))
    assert manager.admit(shorter, manager.get_cached_prefix(shorter), 12, 64)


def test_a_prefix_is_found_while_in_use_and_after() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    first = compute(manager, make_sequence(list(range(10))))
    second = compute(manager, make_sequence([*range(8), 50, 51]))
    assert block_ids(second)[:2] == block_ids(first)[:2]
    assert block_ids(second)[2] != block_ids(first)[2]
    assert second.num_cached_tokens == 8
    assert manager.num_free_blocks == 16 - 4
    manager.free(first)
    assert manager.num_free_blocks == 16 - 3
    manager.free(second)
    assert manager.num_free_blocks == 16
    assert count_cached_blocks(manager, list(range(10))) == 2


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_left_to_compute(num_tokens: int, num_cached: int) -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    compute(manager, make_sequence(list(range(12))))
    assert count_cached_blocks(manager, list(range(num_tokens))) == num_cached


def test_a_block_is_found_only_behind_the_same_prefix() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    compute(manager, make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert count_cached_blocks(manager, [5, 6, 7, 8, 9]) == 0
    assert count_cached_blocks(manager, [1, 2, 3, 0, 5, 6, 7, 8, 9]) == 0
    assert count_cached_blocks(manager, [1, 2, 3, 4, 5, 6, 7, 0, 9]) == 1


def test_requests_share_only_with_those_of_the_same_salt() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    prompt = list(range(9))
    compute(manager, make_sequence(prompt, cache_salt="alice"))
    assert count_cached_blocks(manager, prompt, "alice") == 2
    assert count_cached_blocks(manager, prompt, "bob") == 0
    assert count_cached_blocks(manager, prompt, "") == 0
    assert count_cached_blocks(manager, prompt) == 0


def test_a_request_for_prompt_logprobs_finds_nothing_but_is_found() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    prompt = list(range(9))
    compute(manager, make_sequence(prompt, prompt_logprobs=0))
    assert manager.get_cached_prefix(make_sequence(prompt, prompt_logprobs=0)).block_tables == [BlockTable()]
    assert manager.prefix_cache_queries == 0
    assert count_cached_blocks(manager, prompt) == 2


def test_after_a_reset_nothing_is_found_that_was_computed_before() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    ended, running = compute(manager, make_sequence([1] * 8)), compute(manager, make_sequence([2] * 8))
    manager.free(ended)
    manager.reset_prefix_cache()
    assert [count_cached_blocks(manager, [token] * 9) for token in (1, 2)] == [0, 0]
    assert manager.num_free_blocks == 14
    manager.free(running)
    compute(manager, make_sequence([1] * 8))
    assert count_cached_blocks(manager, [1] * 9) == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4, enable_prefix_caching=False)
    compute(manager, make_sequence(list(range(9))))
    assert count_cached_blocks(manager, list(range(9))) == 0


def test_only_computed_tokens_of_known_value_are_registered() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    sequence = make_sequence(list(range(7)))
    assert manager.allocate(sequence, 8)
    sequence.num_computed_tokens = 3
    manager.cache_full_blocks(sequence)
    assert count_cached_blocks(manager, list(range(9))) == 0
    sequence.num_computed_tokens = 8  # the eighth token is in flight
    manager.cache_full_blocks(sequence)
    assert count_cached_blocks(manager, list(range(9))) == 1
    sequence.output_token_ids.append(7)
    manager.cache_full_blocks(sequence)
    assert count_cached_blocks(manager, list(range(9))) == 2


def test_of_two_equal_blocks_the_first_stays_registered() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    first, second = make_sequence(list(range(9))), make_sequence(list(range(9)))
    for sequence in (first, second):
        assert manager.allocate(sequence, 9)
        sequence.num_computed_tokens = 9
    manager.cache_full_blocks(first)
    manager.cache_full_blocks(second)
    assert set(block_ids(first)).isdisjoint(block_ids(second))
    assert cached_block_ids(manager, list(range(9))) == block_ids(first)[:2]
    manager.free(second)
    assert cached_block_ids(manager, list(range(9))) == block_ids(first)[:2]


def test_blocks_without_a_registration_are_reused_first_then_the_oldest_tail() -> None:
    manager = BlockManager({FULL_CONTEXT: 6}, block_size=4)
    old = compute(manager, make_sequence([1] * 9))
    new = compute(manager, make_sequence([2] * 9))
    old_blocks, new_blocks = list(block_ids(old)), list(block_ids(new))
    manager.free(old)
    manager.free(new)
    taker = make_sequence([3] * 20)
    assert manager.allocate(taker, 20)
    assert set(block_ids(taker)[:2]) == {old_blocks[2], new_blocks[2]}
    assert block_ids(taker)[2:] == [old_blocks[1], old_blocks[0], new_blocks[1]]
    assert cached_block_ids(manager, [2] * 9) == [new_blocks[0]]
    assert count_cached_blocks(manager, [1] * 9) == 0


def test_a_found_block_is_used_last_of_all() -> None:
    manager = BlockManager({FULL_CONTEXT: 3}, block_size=4)
    for token in (1, 2):
        manager.free(compute(manager, make_sequence([token] * 4)))
    manager.free(compute(manager, make_sequence([1] * 5)))  # finds the older block and so renews it
    assert manager.allocate(make_sequence([3] * 8), 8)
    assert count_cached_blocks(manager, [1] * 5) == 1
    assert count_cached_blocks(manager, [2] * 5) == 0


def test_hits_and_queries_count_prompt_tokens() -> None:
    manager = BlockManager({FULL_CONTEXT: 16}, block_size=4)
    compute(manager, make_sequence(list(range(10))))
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (10, 0)
    sequence = compute(manager, make_sequence([*range(8), 99]))
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (19, 8)
    manager.free(sequence)
    sequence.num_preemptions = 1
    compute(manager, sequence)
    assert sequence.num_computed_tokens == 9
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (19, 8)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks={num_blocks} and block_size={block_size}"):
        BlockManager({FULL_CONTEXT: num_blocks}, block_size)


def table(manager: BlockManager, sequence: Sequence, span: AttentionSpan) -> BlockTable:
    return sequence.block_tables[manager.spans.index(span)]


def decode_to(manager: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    """Computes tokens one by one until so many are."""
    while sequence.num_computed_tokens < num_tokens:
        assert manager.allocate(sequence, sequence.num_computed_tokens + 1)
        sequence.num_computed_tokens += 1
        if sequence.num_tokens < sequence.num_computed_tokens:
            sequence.output_token_ids.append(7)
        manager.cache_full_blocks(sequence)


class TestLocalLayers:
    """Blocks of layers that keep a window or a chunk only."""

    def test_a_window_holds_what_the_next_token_sees(self) -> None:
        manager = BlockManager({FULL_CONTEXT: 16, WINDOW: 16}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(4))))
        held = []
        for num_tokens in range(5, 17):
            decode_to(manager, sequence, num_tokens)
            window = table(manager, sequence, WINDOW)
            held.append((window.first, window.stop))
        # A window of 5: the token at position 8 sees 4 to 8, and blocks go when the next one comes.
        assert held == [(0, 2)] * 4 + [(1, 3)] * 4 + [(2, 4)] * 4
        assert table(manager, sequence, FULL_CONTEXT).stop == 4
        assert manager.pools[1].num_free_blocks == 14
        assert manager.usage == 4 / 16
        manager.free(sequence)
        assert manager.num_free_blocks == manager.num_blocks == 32

    def test_blocks_made_for_drafts_do_not_keep_those_that_left_the_window(self) -> None:
        manager = BlockManager({WINDOW: 8}, block_size=4)
        sequence = make_sequence([0])
        for num_computed in range(40):
            sequence.num_computed_tokens = num_computed
            assert manager.allocate(sequence, num_computed + 1)
            # A window of 5 touches at most 2 blocks, and there is one more for drafts.
            assert len(table(manager, sequence, WINDOW).block_ids) <= 3
            assert manager.extend(sequence, 0, num_computed + 4)

    def test_a_prompt_takes_blocks_of_a_window_chunk_by_chunk(self) -> None:
        manager = BlockManager({FULL_CONTEXT: 16, WINDOW: 4}, block_size=4)
        sequence = make_sequence(list(range(40)))
        assert manager.admit(sequence, manager.get_cached_prefix(sequence), 6, 6)
        assert [table(manager, sequence, span).stop for span in manager.spans] == [10, 2]
        for stop in range(12, 41, 6):
            sequence.num_computed_tokens = stop - 6
            assert manager.allocate(sequence, min(stop, 40))
        window = table(manager, sequence, WINDOW)
        assert (window.first, window.stop) == (6, 9)

    def test_allocation_is_in_all_groups_or_in_none(self) -> None:
        manager = BlockManager({FULL_CONTEXT: 2, WINDOW: 8}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(8))))
        assert not manager.allocate(sequence, 9)
        # What no token sees any more went back all the same.
        assert [pool.num_free_blocks for pool in manager.pools] == [0, 7]
        manager = BlockManager({FULL_CONTEXT: 8, WINDOW: 2}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(8))))
        other = make_sequence(list(range(50, 54)))
        assert not manager.admit(other, manager.get_cached_prefix(other), 4, 4)
        assert [pool.num_free_blocks for pool in manager.pools] == [6, 0]
        assert other.block_tables == []

    def test_a_prefix_needs_all_of_full_context_and_the_window_before_its_end(self) -> None:
        manager = BlockManager({FULL_CONTEXT: 16, WINDOW: 16}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(16))))
        decode_to(manager, sequence, 20)
        known = [*range(16), *[7] * 4]
        full, window = manager.get_cached_prefix(make_sequence([*known, 9])).block_tables
        assert (full.first, full.stop) == (0, 5)
        # The token at 20 sees 16 to 20; its block begins at 16.
        assert (window.first, window.stop) == (4, 5)
        # The block of 16 to 19 is gone from the window: the token at 16 sees 12 to 16, whose block is known.
        manager.pools[1].unregister(sequence.block_digests[4])
        full, window = manager.get_cached_prefix(make_sequence([*known, 9])).block_tables
        assert (full.stop, window.first, window.stop) == (4, 3, 4)
        # A window further on does not help where full context ends earlier.
        manager.pools[0].unregister(sequence.block_digests[2])
        assert [t.stop for t in manager.get_cached_prefix(make_sequence([*known, 9])).block_tables] == [2, 2]

    def test_windows_alone_find_a_prefix_whose_beginning_is_gone(self) -> None:
        manager = BlockManager({WINDOW: 16}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(16))))
        for digest in sequence.block_digests[:3]:
            manager.pools[0].unregister(digest)
        [window] = manager.get_cached_prefix(make_sequence(list(range(17)))).block_tables
        assert (window.first, window.stop) == (3, 4)
        follower = compute(manager, make_sequence(list(range(17))))
        assert follower.num_cached_tokens == 16
        assert block_ids(follower)[0] == block_ids(sequence)[3]

    def test_a_new_chunk_needs_nothing_of_those_before(self) -> None:
        chunk = AttentionSpan(None, 8)
        manager = BlockManager({FULL_CONTEXT: 16, chunk: 16}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(16))))
        for digest in sequence.block_digests:
            manager.pools[1].unregister(digest)
        full, local = manager.get_cached_prefix(make_sequence(list(range(17)))).block_tables
        assert (full.stop, local.first, local.stop) == (4, 4, 4)
        assert [t.stop for t in manager.get_cached_prefix(make_sequence(list(range(15)))).block_tables] == [2, 2]

    def test_two_local_groups_agree_on_a_prefix(self) -> None:
        """Each alone would end elsewhere: the longest prefix that both know is the fourth block's."""
        wide = AttentionSpan(9)
        manager = BlockManager({FULL_CONTEXT: 32, wide: 32, WINDOW: 32}, block_size=4)
        sequence = compute(manager, make_sequence(list(range(32))))
        digests = sequence.block_digests
        manager.pools[2].unregister(digests[7])  # the window may end before block 7,
        manager.pools[1].unregister(digests[5])  # the wide one before 5 or after 7,
        manager.pools[2].unregister(digests[4])  # and so the window before 4.
        assert [t.stop for t in manager.get_cached_prefix(make_sequence(list(range(33)))).block_tables] == [4, 4, 4]

    def test_a_long_prompt_does_not_drive_out_the_windows_of_ended_requests(self) -> None:
        manager = BlockManager({FULL_CONTEXT: 100, WINDOW: 12}, block_size=4)
        ended = compute(manager, make_sequence(list(range(50, 58))))
        manager.free(ended)
        long = make_sequence([1] * 120)
        assert manager.admit(long, manager.get_cached_prefix(long), 4, 4)
        decode_to(manager, long, 120)
        assert count_cached_blocks(manager, [*range(50, 58), 9]) == 2
        # The blocks that it moved past last are there, too.
        assert count_cached_blocks(manager, [1] * 105) == 26

    @pytest.mark.parametrize(("num_tokens", "shortage"), [(16, None), (17, (5, 4)), (400, (100, 4))])
    def test_shortage_in_full_context(self, num_tokens: int, shortage: tuple[int, int] | None) -> None:
        manager = BlockManager({FULL_CONTEXT: 4, WINDOW: 4}, block_size=4)
        assert manager.shortage(num_tokens, 4) == shortage

    @pytest.mark.parametrize(("num_tokens", "shortage"), [(400, None), (8, None)])
    def test_a_window_is_never_short_for_one_request(self, num_tokens: int, shortage: None) -> None:
        assert BlockManager({WINDOW: 4}, block_size=4).shortage(num_tokens, 4) == shortage
        assert BlockManager({WINDOW: 3}, block_size=4).shortage(400, 4) == (4, 3)

    def test_full_context_comes_first(self) -> None:
        with pytest.raises(ValueError, match="full context must be the first"):
            BlockManager({WINDOW: 4, FULL_CONTEXT: 4}, block_size=4)
