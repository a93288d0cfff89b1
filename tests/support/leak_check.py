"""The KV cache's blocks after a test."""

from __future__ import annotations

from contextlib import contextmanager


@contextmanager
def no_blocks_leaked(llm):
    """After the block, no request is left and every KV cache block, and slot of a state, is free again."""
    yield llm
    engine = llm.engine
    assert not engine.has_unfinished
    assert not engine.scheduler.has_unfinished
    for rank in engine.scheduler.ranks:
        assert rank.block_manager.num_free_blocks == rank.block_manager.num_blocks
        states = rank.block_manager.states
        if states.pools:
            states.begin_step()  # which gives back what the step before held
            assert states.pool.num_free_blocks == states.pool.num_blocks
