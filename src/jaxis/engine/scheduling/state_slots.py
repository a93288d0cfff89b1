"""The account of recurrent states: which sequence's states lie in which slot, and which slots hold a known prefix's.

Layers with a state (a gated delta rule, Mamba, a short convolution) keep a fixed number of bytes for a sequence,
however long it is. A slot is the memory for the states of all these layers after one token of one sequence.

Every step overwrites a state, so a prefix is found again only if its state was kept: a step may copy the state after a
full block into a second slot, which no step writes to after that. A sequence that finds the kept state reads it there
and writes to a slot of its own, so sharing needs no copy.

Nor can a token be taken out of a state again. A step with drafts therefore writes to another slot than it reads, and
keeps the states after the last known token in a third one. Once the right drafts are known, the sequence goes on from
the last of these states that has seen no wrong draft. It computes the right drafts after that state once more, with its
next tokens. Nothing is computed again if all drafts were right or none was. The alternative, a slot for each draft,
takes that much more memory and writing, of states that are each as large as hundreds of tokens' keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from jaxis.engine.scheduling.block_pool import BlockPool
from jaxis.engine.scheduling.sequence import NO_SLOT, DraftedStates, Sequence, SequenceState
from jaxis.errors import ConfigError

# One slot for a running sequence, and one for the prefix that it continues.
MIN_SLOTS = 2
# Tokens between two kept states that stay. Of the states in between, only the newest stays.
KEPT_STATE_INTERVAL = 1024
# Slots that a sequence needs beyond its own while a step computes drafts for it.
DRAFT_SLOTS = 2


class StateStep(NamedTuple):
    """The slots in which a step finds and leaves the states of one sequence.

    Attributes:
      read: Slot of the states before the sequence's first token in the step; NO_SLOT if the sequence begins.
      write: Slot for the states after the sequence's last token in the step.
      keep: Second slot, for the states after a full block; NO_SLOT for none.
      keep_after: Number of the sequence's tokens in the step before the kept states.
    """

    read: int
    write: int
    keep: int = NO_SLOT
    keep_after: int = 0


class NoStates:
    """The account of states of a model without any.

    Attributes:
      pools: Pool of the slots, if there are any.
    """

    pools: tuple[BlockPool, ...] = ()

    def begin_step(self) -> None:
        """Must be called before each step is scheduled."""

    def has_room(self, kept: int = NO_SLOT, *, loads: bool = False) -> bool:
        """Returns whether another sequence can start from the states in slot `kept`, or from none.

        `loads` counts one more slot, for states that need one first (see `restore`).
        """
        del kept, loads
        return True

    def restore(self, digest: bytes) -> int:
        """Returns a registered, free slot for states that were kept elsewhere; `start` must be called with it next."""
        raise NotImplementedError

    def start(self, sequence: Sequence, kept: int = NO_SLOT, cut: int = 0) -> None:
        """Gives a sequence a slot; see `SequenceState` for `cut`."""

    def start_anew(self, sequence: Sequence) -> bool:
        """Gives a sequence a slot unless it has one; returns False if none is free."""
        del sequence
        return True

    def step(self, sequence: Sequence, start: int, stop: int) -> StateStep | None:
        """Returns where the step that computes the tokens `start` to `stop` finds and leaves the sequence's states."""
        del sequence, start, stop

    def add_drafts(
        self, sequence: Sequence, step: StateStep | None, start: int, known_stop: int, stop: int
    ) -> tuple[bool, StateStep | None]:
        """Changes the result of `step` for drafts that were added to this step of the sequence.

        Args:
          sequence: The sequence.
          step: Result of `step` for the step without drafts.
          start: Position of the step's first token.
          known_stop: Position after the sequence's last known token.
          stop: Position after its last draft.

        Returns:
          Whether enough slots are free for drafts, and the slots of the step.
        """
        del sequence, start, known_stop, stop
        return True, step

    def settle(self, sequence: Sequence, stop: int) -> int:
        """Goes back to the last states of a step with drafts that have seen no wrong draft.

        `stop` is the position after the last right draft, or after the last known token if none is right. Returns the
        position after the last token that those states have seen, from where the sequence is to be computed on.
        """
        del sequence
        return stop

    def register(self, sequence: Sequence, digests: AbstractSequence[bytes]) -> None:
        """Makes the kept states after these blocks, all full of known tokens, findable."""

    def free(self, sequence: Sequence) -> None:
        """Gives the sequence's slots back."""


class StateManager(NoStates):
    """The slots in `pool`, with prefix caching.

    A kept state has the digest of the last block before it (see `BlockManager`), and may be reused like a block of the
    prefix cache: the next sequence that needs a slot may take the slot that was unused for longest. States are kept
    after multiples of `block_size`.
    """

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_caching: bool) -> None:
        """Raises ConfigError if the slots are too few for a sequence."""
        if pool.num_blocks < MIN_SLOTS:
            raise ConfigError(f"recurrent states need at least {MIN_SLOTS} slots, not {pool.num_blocks}")
        self.pool, self.pools = pool, (pool,)
        self._block_size = block_size
        self._keeps_states = enable_prefix_caching
        # Slots that the step being scheduled reads or writes: no other sequence of the step may write to them.
        self._to_give_back: list[int] = []

    def begin_step(self) -> None:
        self.pool.give_back(self._to_give_back)
        self._to_give_back.clear()

    def has_room(self, kept: int = NO_SLOT, *, loads: bool = False) -> bool:
        held = [] if kept == NO_SLOT else [kept]
        return self.pool.num_free_blocks - self.pool.num_free_among(held) >= 1 + loads

    def restore(self, digest: bytes) -> int:
        slot = self.pool.take()
        self.pool.register(digest, slot)
        self.pool.give_back([slot])
        return slot

    def start(self, sequence: Sequence, kept: int = NO_SLOT, cut: int = 0) -> None:
        if kept != NO_SLOT:
            self.pool.hold([kept])
        sequence.state = SequenceState(read=kept, write=self.pool.take(), cut=cut)

    def start_anew(self, sequence: Sequence) -> bool:
        if sequence.state is None:
            if not self.has_room():
                return False
            self.start(sequence)
        return True

    def step(self, sequence: Sequence, start: int, stop: int) -> StateStep:
        state = _state_of(sequence)
        read, keep, keep_after = state.read, NO_SLOT, 0
        # A prompt that is asked for again computes its last token anew.
        num_blocks = (stop - (stop == sequence.num_prompt_tokens)) // self._block_size
        boundary = num_blocks * self._block_size
        if self._keeps_states and boundary > start and self.pool.num_free_blocks:
            keep, keep_after = self.pool.take(), boundary - start
            state.unregistered.append((num_blocks, keep))
        if read not in (NO_SLOT, state.write):
            self._to_give_back.append(read)
        state.read = state.write
        return StateStep(read, state.write, keep, keep_after)

    def add_drafts(
        self, sequence: Sequence, step: StateStep | None, start: int, known_stop: int, stop: int
    ) -> tuple[bool, StateStep | None]:
        assert step is not None, "the step has no slots"
        state = _state_of(sequence)
        if self.pool.num_free_blocks < (step.read == step.write) + (step.keep == NO_SLOT):
            return False, step
        if step.read == step.write:
            state.write = self.pool.take()
        else:
            # The states before the step may be needed again, so their slot is not given back yet.
            self._to_give_back.remove(step.read)
        state.read = step.read
        keep, keep_after, own_keep = step.keep, step.keep_after, NO_SLOT
        if keep == NO_SLOT:
            keep = self.pool.take()
            num_blocks = stop // self._block_size
            boundary = num_blocks * self._block_size
            # Not twice in a row: if the drafts before the boundary are wrong, the known tokens are computed again.
            if self._keeps_states and boundary > known_stop and known_stop == start + 1:
                keep_after = boundary - start
                state.unregistered.append((num_blocks, keep))
            else:
                keep_after, own_keep = known_stop - start, keep
        state.drafted = DraftedStates(start, stop, own_keep, known_stop)
        return True, StateStep(state.read, state.write, keep, keep_after)

    def settle(self, sequence: Sequence, stop: int) -> int:
        state = _state_of(sequence)
        drafted, state.drafted = state.drafted, None
        assert drafted is not None, "the step had no drafts"
        slots = {drafted.start: state.read}
        if drafted.keep != NO_SLOT:
            slots[drafted.keep_stop] = drafted.keep
        kept, state.unregistered = state.unregistered, []
        for num_blocks, slot in kept:
            if num_blocks * self._block_size <= stop:
                state.unregistered.append((num_blocks, slot))
                slots[num_blocks * self._block_size] = slot
            else:
                self.pool.give_back([slot])
        if drafted.stop == stop:
            slots[stop] = state.write
        settled = max(slots)
        # Held once more: a slot that is kept for other sequences is given back when its states can be found.
        self.pool.hold({slots[settled]} - {state.write})
        self.pool.give_back({state.read, drafted.keep} - {NO_SLOT})
        state.read = slots[settled]
        return settled

    def register(self, sequence: Sequence, digests: AbstractSequence[bytes]) -> None:
        """Makes the kept states after these blocks, all full of known tokens, findable.

        Of a running sequence's kept states, these stay: the newest, those at the end of its prompt and at its cut, and
        one in KEPT_STATE_INTERVAL tokens.
        """
        state = sequence.state
        while state is not None and state.unregistered and state.unregistered[0][0] <= len(digests):
            num_blocks, slot = state.unregistered.pop(0)
            self.pool.register(digests[num_blocks - 1], slot)
            self._to_give_back.append(slot)
            if state.newest_kept and not self._stays(sequence, state.newest_kept, num_blocks):
                self.pool.unregister(digests[state.newest_kept - 1])
            state.newest_kept = num_blocks

    def free(self, sequence: Sequence) -> None:
        state, sequence.state = sequence.state, None
        if state is None:
            return
        keep = NO_SLOT if state.drafted is None else state.drafted.keep
        self.pool.give_back({state.read, state.write, keep} - {NO_SLOT})
        self.pool.give_back(slot for _, slot in state.unregistered)

    def _stays(self, sequence: Sequence, num_blocks: int, next_kept: int) -> bool:
        """Returns whether the state after so many blocks stays findable when a later state of the sequence is kept."""
        position, next_position = num_blocks * self._block_size, next_kept * self._block_size
        is_end = num_blocks == (sequence.num_prompt_tokens - 1) // self._block_size
        is_cut = position == _state_of(sequence).cut
        return is_end or is_cut or position // KEPT_STATE_INTERVAL != next_position // KEPT_STATE_INTERVAL


def _state_of(sequence: Sequence) -> SequenceState:
    assert sequence.state is not None, "the sequence holds no slot"
    return sequence.state
