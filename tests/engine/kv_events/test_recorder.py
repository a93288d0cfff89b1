"""A consumer of the events knows exactly the blocks that can be found, and what is in them."""

import random

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.kv_events.recorder import BlocksCleared, BlocksRemoved, BlocksStored, CacheEventRecorder
from jaxis.engine.scheduling.block_manager import BlockManager
from tests.engine.scheduling.test_block_manager import compute, make_sequence

B = 4


class Follower:
    """What a reader of the events believes: (group, digest) -> the block's tokens, parent and salt."""

    def __init__(self):
        self.blocks = {}

    def take(self, events):
        for event in events:
            if isinstance(event, BlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlocksRemoved):
                for digest in event.digests:
                    del self.blocks[event.group, digest]  # was stored before
            else:
                parent = event.parent
                assert len(event.token_ids) == B * len(event.digests)
                for i, digest in enumerate(event.digests):
                    assert (event.group, digest) not in self.blocks
                    tokens = event.token_ids[B * i : B * (i + 1)]
                    self.blocks[event.group, digest] = (tokens, parent, event.cache_salt)
                    parent = digest


def contents(sequences):
    """Digest -> the tokens, parent and salt of every full block of these sequences."""
    blocks = {}
    for sequence in sequences:
        for i, digest in enumerate(sequence.block_digests):
            parent = sequence.block_digests[i - 1] if i else None
            blocks[digest] = (sequence.token_ids(B * i, B * (i + 1)), parent, sequence.cache_salt)
    return blocks


def test_events_tell_what_can_be_found_through_eviction_forgetting_and_resetting():
    recorder, follower = CacheEventRecorder(2, B), Follower()
    assert recorder.take() == [BlocksCleared()]
    manager = BlockManager({FULL_CONTEXT: 24, AttentionSpan(5): 12}, B, connector=recorder)
    draw = random.Random(0)
    prefixes = [[draw.randrange(9) for _ in range(12)] for _ in range(4)]
    seen, num_removed = [], 0
    for number in range(300):
        prompt = draw.choice(prefixes)[: draw.randrange(13)] + [
            draw.randrange(99) for _ in range(draw.randrange(1, 20))
        ]
        sequence = compute(manager, make_sequence(prompt, draw.choice([None, "tenant"])))
        seen.append(sequence)
        manager.free(sequence)
        if number % 40 == 20:
            manager.forget_prefix(sequence)
        if number % 100 == 99:
            manager.reset_prefix_cache()
        events = recorder.take()
        num_removed += sum(isinstance(event, BlocksRemoved) for event in events)
        follower.take(events)
        known = contents(seen)
        findable = {
            (group, digest): known[digest]
            for group, pool in enumerate(manager.pools)
            for digest in known
            if pool.find(digest) is not None
        }
        assert follower.blocks == findable
    assert num_removed > 100


def test_blocks_of_one_step_are_one_event():
    recorder = CacheEventRecorder(1, B)
    manager = BlockManager({FULL_CONTEXT: 8}, B, connector=recorder)
    recorder.take()
    sequence = compute(manager, make_sequence(list(range(14))))
    digests = tuple(sequence.block_digests)
    assert len(digests) == 3
    assert recorder.take() == [BlocksStored(0, digests, None, list(range(12)), None)]
    sequence.output_token_ids += [14, 15]
    sequence.num_computed_tokens = 16
    manager.cache_full_blocks(sequence)
    assert recorder.take() == [BlocksStored(0, (sequence.block_digests[3],), digests[2], [12, 13, 14, 15], None)]
    assert recorder.take() == []


def test_a_reset_replaces_what_happened_before_it():
    recorder = CacheEventRecorder(1, B)
    manager = BlockManager({FULL_CONTEXT: 8}, B, connector=recorder)
    compute(manager, make_sequence(list(range(14))))
    manager.reset_prefix_cache()
    assert recorder.take() == [BlocksCleared()]
