from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

# Tokens of a prompt's part, which has one digest, and number of parts remembered: four million tokens in all.
_PART_TOKENS, _MAX_PARTS = 1024, 4096
LONG_PROMPT = 4096
"""Number of recomputed tokens from which on the log reports a prompt."""
_logger = logging.getLogger(__name__)


class RepeatedPrompts:
    """Digests of the long prompts computed so far. The first repeated prompt is reported once in the log.

    A KV cache on disk would avoid its computation.
    """

    def __init__(self) -> None:
        self._parts: OrderedDict[int, None] = OrderedDict()
        self._has_said = False

    @property
    def num_parts(self) -> int:
        """Number of parts that are remembered."""
        return len(self._parts)

    def note(self, token_ids: Sequence[int], num_cached: int, kind: Hashable, has_disk: Callable[[], bool]) -> None:
        """Notes a prompt that was computed, and how many of its tokens were found in the prefix cache.

        Prompts of different kinds, such as model and salt, share no blocks. `has_disk` returns whether blocks are
        already kept on disk, which leaves nothing to suggest.
        """
        if self._has_said or len(token_ids) - num_cached < LONG_PROMPT or has_disk():
            return
        digest, num_again = hash(kind), 0
        for start in range(0, len(token_ids) - _PART_TOKENS + 1, _PART_TOKENS):
            digest = hash((digest, *token_ids[start : start + _PART_TOKENS]))
            if start >= num_cached and digest in self._parts:
                num_again += _PART_TOKENS
            self._parts[digest] = None
            self._parts.move_to_end(digest)
        while len(self._parts) > _MAX_PARTS:
            self._parts.popitem(last=False)
        if num_again >= LONG_PROMPT:
            self._has_said = True
            _logger.info(
                "%d tokens of a prompt were computed for the second time, since the KV cache had made room for others: "
                "jaxis serve --kv-disk keeps them on disk, over restarts too",
                num_again,
            )
