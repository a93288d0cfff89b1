"""The account of the paged KV cache: which sequence holds which blocks, and which blocks hold a known prefix.

A block is the memory for the keys and values of `block_size` tokens in one group of layers: the layers that attend over
the same span of a sequence. Each group has its own pool of blocks, and each sequence has a block table in each group.
This module only counts: block ids index arrays that the runner allocates.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.scheduling.block_connector import NO_CONNECTOR, BlockConnector, LoadedBlock
from jaxis.engine.scheduling.block_digests import extend_digests
from jaxis.engine.scheduling.block_pool import BlockPool
from jaxis.engine.scheduling.prefix_search import PrefixSearch
from jaxis.engine.scheduling.sequence import NO_SLOT, BlockTable, Sequence
from jaxis.engine.scheduling.state_slots import NoStates, StateManager, StateStep
from jaxis.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

NO_BLOCK = -1


@dataclass(frozen=True)
class CachedPrefix:
    """The longest known prefix of a sequence's tokens.

    Attributes:
      num_blocks: Blocks of the prefix.
      block_tables: The prefix's blocks in each group; all tables end at the same block. NO_BLOCK stands for a block
        that is not on the device.
      state_slot: Slot of the recurrent states after the prefix; NO_SLOT if the prefix is empty, the model has no such
        states, or they are not on the device.
      state_cut: Position where a step of the sequence should end (see `SequenceState.cut`); 0 for no such position.
      stored: Contents of the blocks that are not on the device, by group and index of the block, from
        `BlockConnector.find`.
    """

    num_blocks: int
    block_tables: list[BlockTable]
    state_slot: int = NO_SLOT
    state_cut: int = 0
    stored: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)


class BlockManager:
    """The pools of all groups, with prefix caching.

    Layers with full context keep every block of a sequence. Layers with a window (or chunk) keep only the blocks that
    tokens still to be computed can see; the rest return to the pool when the sequence next needs new blocks. Layers
    with a recurrent state have slots, in `states`, instead of blocks.

    A full block is named by SHA-256 over its parent's digest and its exact token ids; the first block's parent is
    derived from the sequence's salt. So equal digests mean equal salt and equal tokens from position 0 on. Only full
    blocks are registered and thus shared, and no sequence writes to a full block: sharing needs no copy-on-write.

    A prefix may continue in blocks that `connector` keeps beyond the device. They are copied into fresh blocks before
    the sequence's first step.

    Attributes:
      spans: The span of each group; full context, if any, comes first.
      pools: The pool of each group.
      block_size: Tokens in a block (B).
      search: Search for the longest known prefix.
      states: Manager of the slots of recurrent states, if layers have any.
      enable_prefix_caching: True if blocks are registered and looked up.
      connector: Connector that keeps or follows blocks beyond the device.
      weights: Name of the weights that compute the blocks, on which digests depend; b"" for the first weights.
      prefix_cache_queries: Prompt tokens looked up, each sequence counted once, when first admitted.
      prefix_cache_hits: Prompt tokens found among them.
    """

    def __init__(
        self,
        num_blocks: Mapping[AttentionSpan, int],
        block_size: int,
        enable_prefix_caching: bool = True,
        num_state_slots: int | None = None,
        connector: BlockConnector = NO_CONNECTOR,
        weights: bytes = b"",
    ) -> None:
        """Creates the pools.

        Args:
          num_blocks: Blocks for the layers of each span. Full context must come first. Empty if no layer attends.
          block_size: Tokens in a block (B).
          enable_prefix_caching: True to keep and find known prefixes.
          num_state_slots: Slots for recurrent states; None if no layer has any.
          connector: Connector to blocks beyond the device.
          weights: Name of the weights that compute the blocks.

        Raises:
          ConfigError: A size is not positive.
        """
        if min(num_blocks.values(), default=1) < 1 or block_size < 1:
            sizes = ", ".join(map(str, num_blocks.values()))
            raise ConfigError(f"the KV cache needs num_blocks={sizes} and block_size={block_size} of at least 1")
        self.spans = tuple(num_blocks)
        if FULL_CONTEXT in self.spans[1:]:
            raise ValueError("layers with full context must be the first group")
        self.connector, self.weights = connector, weights
        self.pools = tuple(BlockPool(number, group, connector) for group, number in enumerate(num_blocks.values()))
        self.states: NoStates = NoStates()
        if num_state_slots is not None:
            state_pool = BlockPool(num_state_slots, len(num_blocks), connector)
            self.states = StateManager(state_pool, block_size, enable_prefix_caching)
        self._all_pools = (*self.pools, *self.states.pools)
        self.search = PrefixSearch(self.spans, block_size, has_states=bool(self.states.pools))
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence holds, registered ones included."""
        return sum(pool.num_free_blocks for pool in self.pools)

    @property
    def usage(self) -> float:
        """The share of the blocks, or slots, that sequences hold, 0 to 1, in the pool where it is largest."""
        return max(1.0 - pool.num_free_blocks / pool.num_blocks for pool in self._all_pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def shortage(self, num_tokens: int, max_step_tokens: int) -> tuple[int, int] | None:
        """Returns the shortage that a sequence growing to `num_tokens` tokens would meet even if it ran alone.

        A step computes at most `max_step_tokens`. The result is the blocks that the sequence may need and the blocks
        that exist, in the first pool that is too small; None if every pool is large enough.
        """
        for span, pool in zip(self.spans, self.pools, strict=True):
            num_needed = span.max_held_blocks(1, num_tokens, self.block_size, max_step_tokens)
            if num_needed > pool.num_blocks:
                return num_needed, pool.num_blocks
        return None

    def has_room_for(self, num_tokens: int) -> bool:
        """Returns whether every pool has free blocks for this many more tokens and for what they see of each other."""
        return all(
            pool.num_free_blocks >= span.max_held_blocks(1, num_tokens, self.block_size, num_tokens)
            for span, pool in zip(self.spans, self.pools, strict=True)
        )

    def begin_step(self) -> None:
        """Must be called before each step is scheduled."""
        self.states.begin_step()

    def state_step(self, sequence: Sequence, start: int, stop: int) -> StateStep | None:
        """Returns where the step of these tokens finds and leaves the sequence's states; None without states."""
        return self.states.step(sequence, start, stop)

    def add_drafts(
        self, sequence: Sequence, state: StateStep | None, start: int, known_stop: int, stop: int
    ) -> tuple[bool, StateStep | None]:
        """Allocates blocks and slots for drafts behind a step's known tokens, from `known_stop` up to `stop`.

        The step begins at position `start`; `state` is its `state_step` without drafts. Returns whether there were
        enough blocks and slots, and where the step then finds and leaves the sequence's states.
        """
        if not self.extend(sequence, start, stop):
            return False, state
        return self.states.add_drafts(sequence, state, start, known_stop, stop)

    def settle(self, sequence: Sequence, stop: int) -> int:
        """Accepts the drafts of a step that are right, those before the position `stop`.

        Returns the number of the sequence's tokens that count as computed. With recurrent states, the last tokens up to
        `stop` may have to be computed again (see `StateManager.settle`).
        """
        return self.states.settle(sequence, stop)

    def get_cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Returns the longest known prefix of the sequence's tokens.

        With full context, every block of the prefix is known; with a window, the blocks that the first token after the
        prefix sees; with recurrent states, the states after its last block. At least one token is left to compute, for
        its logits: a sequence found whole recomputes its last block, in a block of its own. A sequence for prompt
        log-probabilities needs every position's logits and finds nothing.
        """
        prefix = None
        if self._uses_prefix_cache(sequence):
            digests = self._digests(sequence, (sequence.num_tokens - 1) // self.block_size)
            while prefix is None:  # the connector may evict a block between two looks
                prefix = self._known_prefix(digests)
        return prefix or CachedPrefix(0, [BlockTable() for _ in self.spans])

    def is_known(self, group: int, digest: bytes) -> bool:
        """Returns whether a block or state is in its pool or beyond the device. Other threads may call this."""
        return self.block_of(group, digest) is not None or self.connector.has(group, digest)

    def block_of(self, group: int, digest: bytes) -> int | None:
        """Returns the block, or slot, that is registered under the digest in its group's pool."""
        return self._all_pools[group].find(digest)

    def admit(self, sequence: Sequence, prefix: CachedPrefix, num_tokens: int, max_step_tokens: int) -> bool:
        """Allocates the blocks that a waiting sequence needs to start; returns False, and allocates none, if too few.

        With full context, these are blocks for all its tokens, not just the first step's: an admitted long prompt runs
        to its end instead of being preempted midway. With a window, these are blocks for the first step, provided the
        pool has enough for the most blocks that the sequence will hold at once.

        Args:
          sequence: The sequence.
          prefix: Newest result of `get_cached_prefix`; it counts as computed.
          num_tokens: Tokens that will be computed after the first step, counted from position 0.
          max_step_tokens: Most tokens that any step computes.
        """
        num_needed_blocks = self.num_blocks_for(sequence.num_tokens)
        stored_state = prefix.stored.get((len(self.spans), prefix.num_blocks - 1))
        if not self.states.has_room(prefix.state_slot, loads=stored_state is not None):
            return False
        groups = list(zip(self.spans, self.pools, prefix.block_tables, strict=True))
        on_device = [_on_device(table) if prefix.stored else table.block_ids for table in prefix.block_tables]
        for (span, pool, table), found in zip(groups, on_device, strict=True):
            num_held = min(
                num_needed_blocks - table.first,
                span.max_held_blocks(1, sequence.num_tokens, self.block_size, max_step_tokens),
            )
            if num_held - len(found) > pool.num_free_blocks - pool.num_free_among(found):
                return False
        for pool, found in zip(self.pools, on_device, strict=True):
            pool.hold(found)
        loads = self._load(sequence, prefix)
        for span, pool, table in groups:
            stop = num_needed_blocks if span == FULL_CONTEXT else self.num_blocks_for(num_tokens)
            table.block_ids.extend(pool.take() for _ in range(stop - table.stop))
        slot = prefix.state_slot
        if stored_state is not None:
            digest = sequence.block_digests[prefix.num_blocks - 1]
            slot = self.states.restore(digest)
            loads.append(LoadedBlock(len(self.spans), digest, slot, stored_state))
        self.states.start(sequence, slot, prefix.state_cut)
        sequence.block_tables = prefix.block_tables
        sequence.num_registered_blocks = prefix.num_blocks
        sequence.num_computed_tokens = prefix.num_blocks * self.block_size
        num_missing = 0
        if self._uses_prefix_cache(sequence):
            num_missing = max(0, sequence.num_prompt_tokens // self.block_size - prefix.num_blocks)
            # A preempted sequence finds its own blocks again, which saves nothing worth reporting.
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.prefix_cache_queries += sequence.num_prompt_tokens
                self.prefix_cache_hits += sequence.num_cached_tokens
        self.connector.allocated(sequence, prefix.num_blocks, loads, num_missing)
        return True

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the sequence's tables cover its first `num_tokens` tokens, of which `num_computed_tokens` are computed.

        With a window, blocks that no token from `num_computed_tokens` on sees are given back. Returns False, and
        allocates nothing, if a group has too few blocks.
        """
        # No table is shorter than the last.
        num_spare = sequence.block_tables[-1].stop - self.num_blocks_for(num_tokens) if sequence.block_tables else -1
        if num_spare > 0:  # made for drafts
            self._give_back_unseen(sequence, sequence.num_computed_tokens)
        if num_spare >= 0:
            return True  # nearly every decode
        if not sequence.block_tables:
            sequence.block_tables = [BlockTable() for _ in self.spans]
        if not self.states.start_anew(sequence):
            return False
        return self.extend(sequence, sequence.num_computed_tokens, num_tokens)

    def extend(self, sequence: Sequence, start: int, num_tokens: int) -> bool:
        """Does the same as `allocate` midway in a step that computes the sequence's tokens from position `start` on."""
        self._give_back_unseen(sequence, start)
        num_blocks = self.num_blocks_for(num_tokens)
        groups = list(zip(self.pools, sequence.block_tables, strict=True))
        if any(num_blocks - table.stop > pool.num_free_blocks for pool, table in groups):
            return False
        for pool, table in groups:
            table.block_ids.extend(pool.take() for _ in range(num_blocks - table.stop))
        return True

    def free(self, sequence: Sequence) -> None:
        """Gives the sequence's blocks and slots back and marks none of its tokens as computed."""
        self.states.free(sequence)
        for pool, table in zip(self.pools, sequence.block_tables, strict=False):  # no tables while it waits
            # Last block first: a prefix is useful without its tail, but a tail is useless without its prefix.
            pool.give_back(reversed(table.block_ids))
        sequence.block_tables = []
        sequence.num_computed_tokens = 0

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Registers the sequence's blocks that are full of computed tokens whose values are known.

        If an equal block is registered already (two sequences computed the same prefix side by side), it stays
        registered, and the sequence keeps its own block beside it.
        """
        if sequence.num_computed_tokens // self.block_size <= sequence.num_registered_blocks:
            return  # nearly every decode
        if not self.enable_prefix_caching:
            return
        num_full = min(sequence.num_computed_tokens, sequence.num_tokens) // self.block_size
        if num_full <= sequence.num_registered_blocks:
            return
        digests = self._digests(sequence, num_full)
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            # With a short window a block may have been freed before the values of its tokens were known.
            for index in range(max(sequence.num_registered_blocks, table.first), num_full):
                pool.register(digests[index], table.block_ids[index - table.first])
        self.connector.computed(sequence, sequence.num_registered_blocks, num_full)
        self.states.register(sequence, digests)
        sequence.num_registered_blocks = num_full

    def forget_prefix(self, sequence: Sequence) -> None:
        """Unregisters every block that holds a prefix of the sequence's tokens: no other sequence will find them."""
        for pool in self._all_pools:
            for digest in sequence.block_digests:
                pool.unregister(digest)
        self.connector.removed(sequence.block_digests)

    def reset_prefix_cache(self) -> None:
        """Unregisters every block: no sequence will find what was computed before."""
        for pool in self._all_pools:
            pool.unregister_all()
        self.connector.cleared()

    def set_weights(self, weights: bytes) -> None:
        """Changes the weights that compute the blocks: no sequence will find what was computed before."""
        self.weights = weights
        self.reset_prefix_cache()

    def prompt_digests(self, sequence: Sequence) -> list[bytes]:
        """Returns the digests of the prompt's blocks that another sequence with the same prompt could find."""
        return self._digests(sequence, (sequence.num_prompt_tokens - 1) // self.block_size)

    def _uses_prefix_cache(self, sequence: Sequence) -> bool:
        return self.enable_prefix_caching and not sequence.sampling_params.computes_whole_prompt

    def _known_prefix(self, digests: AbstractSequence[bytes]) -> CachedPrefix | None:
        """Returns None if a block that the connector had is gone meanwhile."""
        num_blocks, without_states = self.search.longest(digests, self.is_known)
        prefix = CachedPrefix(num_blocks, [])
        for group, pool in enumerate(self.pools):
            first = self.search.first_block(group, num_blocks * self.block_size)
            block_ids = array("i")
            for index in range(first, num_blocks):
                block_id = pool.find(digests[index])
                if block_id is None and not self._find_stored(prefix, group, index, digests[index]):
                    return None
                block_ids.append(NO_BLOCK if block_id is None else block_id)
            prefix.block_tables.append(BlockTable(block_ids, first))
        slot = None
        for pool in self.states.pools if num_blocks else ():
            slot = pool.find(digests[num_blocks - 1])
            if slot is None and not self._find_stored(prefix, len(self.spans), num_blocks - 1, digests[num_blocks - 1]):
                return None
        cut = without_states * self.block_size if without_states > num_blocks else 0
        return replace(prefix, state_slot=NO_SLOT if slot is None else slot, state_cut=cut)

    def _find_stored(self, prefix: CachedPrefix, group: int, index: int, digest: bytes) -> bool:
        data = self.connector.find(group, digest)
        if data is not None:
            prefix.stored[group, index] = data
        return data is not None

    def _load(self, sequence: Sequence, prefix: CachedPrefix) -> list[LoadedBlock]:
        """Allocates a block for each block of the prefix that is not on the device; returns the copies to make."""
        loads: list[LoadedBlock] = []
        if not prefix.stored:
            return loads
        for group, (pool, table) in enumerate(zip(self.pools, prefix.block_tables, strict=True)):
            for offset, block_id in enumerate(table.block_ids):
                if block_id == NO_BLOCK:
                    index = table.first + offset
                    digest = sequence.block_digests[index]
                    block_id = table.block_ids[offset] = pool.take()
                    # Registered at once, so that a sequence that is admitted next shares the block.
                    pool.register(digest, block_id)
                    loads.append(LoadedBlock(group, digest, block_id, prefix.stored[group, index]))
        return loads

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Returns the digests of the first `num_blocks` blocks; each is computed once in the sequence's life."""
        digests = sequence.block_digests
        if len(digests) < num_blocks:
            of_sequence = sequence.cache_salt, sequence.identity
            extend_digests(
                digests,
                num_blocks,
                sequence.token_ids,
                self.block_size,
                *of_sequence,
                weights=self.weights,
                spans=sequence.spans,
            )
        return digests[:num_blocks]

    def _give_back_unseen(self, sequence: Sequence, position: int) -> None:
        for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=True)):
            num_unseen = self.search.first_block(group, max(position, 0)) - table.first
            if num_unseen > 0:
                pool.give_back(table.block_ids[:num_unseen], out_of_window=True)
                del table.block_ids[:num_unseen]
                table.first += num_unseen


def _on_device(table: BlockTable) -> list[int]:
    return [block_id for block_id in table.block_ids if block_id != NO_BLOCK]
