"""Notices long prompts that are computed a second time, which a KV cache on disk would have kept."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

# Tokens of a part of a prompt that is known by one digest, and how many parts are remembered: four million tokens.
_PART_TOKENS, _MAX_PARTS = 1024, 4096
LONG_PROMPT = 4096
"""Tokens that must have been computed twice for the log to say so."""
_logger = logging.getLogger(__name__)


class RepeatedPrompts:
    """Remembers, by digests, what was computed of long prompts; says once in the log that some of it was anew."""

    def __init__(self) -> None:
        self._parts: OrderedDict[int, None] = OrderedDict()
        self._has_said = False

    def note(self, token_ids: Sequence[int], num_cached: int, kind: Hashable, has_disk: Callable[[], bool]) -> None:
        """Notes a prompt that was computed.

        Args:
          token_ids: The prompt's.
          num_cached: How many of them needed no computing.
          kind: Prompts of other kinds, such as those of another model or salt, share nothing with it.
          has_disk: Whether blocks are kept on disk, so that there is nothing to suggest.
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
