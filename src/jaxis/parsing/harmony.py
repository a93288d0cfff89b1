"""GPT-OSS's harmony format: an answer is a sequence of messages, each with a header.

A message is `<|start|>assistant<|channel|>analysis<|message|>...<|end|>`. The channel is analysis (reasoning), final
(the answer) or commentary (a preamble, or a call). A call's header names its recipient, before or after the channel:
`to=functions.f`; its message is JSON and ends in `<|call|>`. The prompt ends in `<|start|>assistant`, so the text
begins inside a header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxis.parsing.text_reader import Reading, TextReader

OPENERS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>")

_MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True)
class Header:
    """A message's header.

    Attributes:
      text: As it stands.
      complete: Whether a message follows; if not, this is no header, or the text has ended inside it.
      channel: May be empty.
      function: What is called; None where nothing is.
    """

    text: str
    complete: bool
    channel: str
    function: str | None


def read_header(reader: TextReader, opener: str) -> Reading[Header]:
    """Reads a header.

    Args:
      reader: Stands after the opener.
      opener: What of it was taken already.
    """
    pieces = [opener]
    marker = yield from reader.until((_MESSAGE, *ENDS), pieces.append)
    if marker in ENDS:
        reader.unread(marker)
    text = "".join([*pieces, _MESSAGE]) if marker == _MESSAGE else "".join(pieces)
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    function = recipient[1] if recipient and recipient[1] != "assistant" else None
    return Header(text, marker == _MESSAGE, channel[1] if channel else "", function)


def read_first_recipient(reader: TextReader) -> Reading[str]:
    """Reads what a header may go on with at the beginning of the text: `to=`, if it does."""
    reader.record()
    yield from reader.skip_space()
    if (yield from reader.comes("to=")):
        reader.skip(len("to="))
        return reader.recorded()
    return reader.rewind()
