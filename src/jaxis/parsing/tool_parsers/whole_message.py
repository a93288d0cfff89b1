from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_grammar import CallGrammar
from jaxis.parsing.tool_parsers.json_call import JSONToolParser


class WholeMessageToolParser(JSONToolParser):
    """Base class of formats whose calls are the whole message, or come after a special token.

    Without a special token before it, text that looks like a call may be an answer: it is a call only if the message
    begins with it, by `bracket`, and it names a function that was offered.
    """

    bracket: ClassVar[str]

    @classmethod
    def write_calls(cls, grammar: CallGrammar) -> str:
        """Returns the calls, without a special token."""
        raise NotImplementedError

    @classmethod
    def write_answer(cls, grammar: CallGrammar, answer: str | None, *, must_call: bool) -> str:
        """Returns the calls, or text that does not begin with their bracket."""
        calls = cls.write_calls(grammar)
        if must_call:
            return calls
        after_token = (f"{grammar.text(token)} {calls}" for token in cls.openers if grammar.has_token(token))
        if answer is not None:
            return grammar.choice((answer, calls, *after_token))
        text = grammar.terminal(rf"/\s*([^\s\{cls.bracket}](?s:.*))?/")
        text = grammar.rule(f"{text} {grammar.more_free_text(*cls.openers)}")
        return grammar.choice((text, calls, *after_token))

    def _read(self) -> Reading[None]:
        yield from self._attempt("")
        yield from super()._read()

    def _read_call(self, opener: str) -> Reading[None]:
        if opener:
            self._reader.record()  # a special token is not content
        yield from self._read_calls()

    def _read_calls(self) -> Reading[None]:
        """Reads the calls that `write_calls` describes."""
        raise NotImplementedError

    def _is_call(self, name: str) -> bool:
        return not self._tools or name in self._tools
