from __future__ import annotations

import json

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.base import ToolParser


class TextInputToolParser(ToolParser):
    """One call of the first tool, with the whole message as its argument `input`: the grammar allows nothing else.

    Only the reason why the model stopped shows whether the text is complete.
    """

    def _read(self) -> Reading[None]:
        text: list[str] = []
        yield from self._reader.until((), text.append)
        self._start_call(next(iter(self._tools)))
        self._add_arguments(json.dumps({"input": "".join(text)}, ensure_ascii=False))

    def _read_call(self, opener: str) -> Reading[None]:
        raise NotImplementedError("no marker opens a call")
