"""Tracker of a completion's reasoning by the marks in its text; a mark may have any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxis.parsing.reasoning_parsers.base import ReasoningMarks
from jaxis.tokenizer import Tokenizer


class MarkTracker:
    """Position of one completion in its reasoning.

    Attributes:
      in_reasoning: True if the newest token is part of reasoning that has not ended.
      num_tokens: Tokens of the reasoning so far, marks included.
      num_thought: Tokens of the reasoning so far, without those that open it.
      opening: Index of the opening mark of the newest reasoning; 0 if the prompt opened it.
      is_over: True if no more reasoning can come.
      end: Length of the completion, in tokens, when the newest reasoning ended; None if none has.
      closing: The mark that ended it.
      rest: Text of its last token after that mark.
    """

    def __init__(self, marks: ReasoningMarks, tokenizer: Tokenizer) -> None:
        self.in_reasoning = marks.opened
        self.num_tokens = 0
        self.num_thought = 0
        self.opening = 0
        self.is_over = False
        self.end: int | None = None
        self.closing = self.rest = b""
        self._token_bytes = tokenizer.token_bytes
        self._repeats = marks.repeats
        self._openings = [opening.encode() for opening in marks.openings]
        self._closings = [closing.encode() for closing in marks.closings]
        self._num_kept = max(map(len, (*self._openings, *self._closings))) - 1
        self._num_followed = 0
        self._text = b""  # as much of the newest text as a mark may begin in
        self._sizes: tuple[int, ...] = ()  # of the newest tokens, in bytes: as many as a mark may have

    @property
    def text(self) -> bytes:
        """The end of the text, back to the first possible beginning of a mark."""
        return self._text

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Takes in the tokens generated since the last call."""
        for token_id in output_token_ids[self._num_followed :]:
            self._num_followed += 1
            if not self.is_over:
                self._take(self._token_bytes(token_id))

    def _take(self, text: bytes) -> None:
        self._text += text
        self._sizes = (*self._sizes[-self._num_kept :], len(text))
        if self.in_reasoning:
            self.num_tokens += 1
            self.num_thought += 1
            self._close()
        else:
            self._open()

    def _close(self) -> None:
        found = [(at, mark) for mark in self._closings if (at := self._text.find(mark)) >= 0]
        if found:
            at, self.closing = min(found)
            self.in_reasoning = False
            self.is_over = not self._repeats
            self.end = self._num_followed
            self.rest = self._text[at + len(self.closing) :]
            self._text = self._text[at:]  # it may be the beginning of what opens the reasoning again
        else:
            self._text = self._text[-self._num_kept :]

    def _open(self) -> None:
        if not self._repeats:
            self._text = self._text.lstrip()
        for index, mark in enumerate(self._openings):
            at = self._text.find(mark) if self._repeats else (0 if self._text.startswith(mark) else -1)
            if at >= 0:
                self.in_reasoning, self.opening = True, index
                self.num_tokens += self._num_covering(len(self._text) - at)
                self._text = self._text[at + len(mark) :]
                self._close()
                return
        if self._repeats:
            self._text = self._text[-self._num_kept :]
        elif not any(mark.startswith(self._text) for mark in self._openings):
            self.is_over = True

    def _num_covering(self, num_bytes: int) -> int:
        """Returns how many of the newest tokens hold the newest bytes."""
        count = 0
        while num_bytes > 0 and count < len(self._sizes):
            count += 1
            num_bytes -= self._sizes[-count]
        return count
