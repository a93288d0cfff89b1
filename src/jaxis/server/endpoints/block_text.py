"""What a model gets to see of content blocks: text."""

from __future__ import annotations

from collections.abc import Iterable

from jaxis.server.protocol.message_blocks import (
    BlocksSource,
    DocumentBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
)


def joined(texts: Iterable[str]) -> str:
    """Texts of blocks as one text, each on lines of its own."""
    text = ""
    for part in texts:
        text += "\n" if text and part and not text.endswith("\n") else ""
        text += part
    return text


def text_of(block: TextBlock | DocumentBlock | SearchResultBlock) -> str:
    """A block as text."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return joined([block.title, block.source, *(part.text for part in block.content)])
        case DocumentBlock(source=TextSource(data=data)):
            body = data
        case DocumentBlock(source=BlocksSource(content=str(content))):
            body = content
        case DocumentBlock(source=BlocksSource(content=list(parts))):
            body = joined(part.text for part in parts)
    return joined([block.title or "", block.context or "", body])
