"""A finished output file as a sequence of conversations."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from jaxis.jsonl.conversation import Conversation


class ConversationFile(Sequence[Conversation]):
    """The conversations of a JSONL file, each read on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = array("q")
        offset = 0
        with path.open("rb") as file:
            for line in file:
                self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            return Conversation.from_dict(json.loads(file.readline()))
