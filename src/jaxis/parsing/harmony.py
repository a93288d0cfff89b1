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

MESSAGE = "<|message|>"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True)
class Header:
    """A message's header, verbatim; the channel may be empty, and `function` is None if this is not a call.

    `complete` is True if a message follows. False: this is not a header, or the text ended inside it.
    """

    text: str
    complete: bool
    channel: str
    function: str | None


def read_header(reader: TextReader, opener: str, ends: tuple[str, ...] = ENDS) -> Reading[Header]:
    """Reads a header after its opener, which is already read; `ends` are markers that end a message."""
    pieces = [opener]
    marker = yield from reader.until((MESSAGE, *ends), pieces.append)
    if marker in ends:
        reader.unread(marker)
    text = "".join([*pieces, MESSAGE]) if marker == MESSAGE else "".join(pieces)
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    function = recipient[1] if recipient and recipient[1] != "assistant" else None
    return Header(text, marker == MESSAGE, channel[1] if channel else "", function)


def read_first_recipient(reader: TextReader) -> Reading[str]:
    """Reads `to=` if it comes next: a header at the beginning of the text may continue with a recipient."""
    reader.record()
    yield from reader.skip_space()
    if (yield from reader.comes("to=")):
        reader.skip(len("to="))
        return reader.recorded()
    return reader.rewind()
