"""Which tokens precede an answer's grammar (reasoning), and which may replace it (tool calls)."""

from __future__ import annotations

from jaxis.engine.grammar.delayed_grammar import ReasoningTokens
from jaxis.parsing.reasoning_parsers.base import ReasoningParser
from jaxis.parsing.tool_parsers.base import ToolParser
from jaxis.tokenizer import Tokenizer

_GAPS = ("\n\n", "\n", " ")


def reasoning_tokens(
    parser: type[ReasoningParser] | None, prompt: str, tokenizer: Tokenizer | None
) -> ReasoningTokens | None:
    """Which tokens delimit an answer's reasoning.

    Args:
      parser: Parses the model's reasoning.
      prompt: As rendered; a template may have opened the reasoning, or closed it.
      tokenizer: The model's.

    Returns:
      None if there is no reasoning, or its tokens do not show where it ends: a grammar then applies from the first
      token.
    """
    if parser is None or tokenizer is None:
        return None
    prompt = prompt.rstrip()
    if prompt.endswith(parser.closings):
        return None
    closings = [tokenizer.encode(text, add_special_tokens=False) for text in parser.closings]
    # A marker of ordinary tokens may be tokenized differently elsewhere.
    closings = [ids for ids in closings if len(ids) == 1 or ids[0] in tokenizer.special_token_ids]
    opened = parser.opened_by(prompt)
    opening = None if opened else tokenizer.token_to_id(parser.opening)
    if not closings or (not opened and opening is None):
        return None
    gaps = (tokenizer.encode(text, add_special_tokens=False) for text in (*_GAPS, *parser.answer_openings))
    gap = [ids[0] for ids in gaps if len(ids) == 1]
    return ReasoningTokens(opened, opening, closings, gap)


def call_tokens(parser: type[ToolParser] | None, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens that begin a tool call and nothing else; empty if calls begin as ordinary text does."""
    if parser is None or tokenizer is None:
        return []
    ids = (tokenizer.token_to_id(marker) for marker in parser.call_markers)
    return [token_id for token_id in ids if token_id is not None]
