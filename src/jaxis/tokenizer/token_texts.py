"""Vocabularies as lists of texts: the index of a token is its id and its row in the embedding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken

MAX_ADDED_ROWS = 1 << 20  # far more than any model adds; an id beyond is a broken file


def distinct_texts(texts: Sequence[str]) -> list[str]:
    """Returns valid, distinct texts, as the library needs them; the others get a name that no text becomes.

    Of equal texts the last one stays. An empty text, or one with surrogate escapes (bytes that are not UTF-8), cannot
    stay.
    """
    last = {text: i for i, text in enumerate(texts)}
    return [text if text and last[text] == i and _is_valid(text) else unused_text(i) for i, text in enumerate(texts)]


def unused_text(token_id: int) -> str:
    return f"<jaxis-unused-{token_id}>"


def with_added_tokens(texts: Sequence[str], added: Mapping[int, AddedToken]) -> list[str]:
    """Returns the texts with added tokens in their rows: behind the vocabulary, or in place of a row's text.

    Raises ValueError for a negative or absurd id, or two ids for one token.
    """
    rows = list(texts)
    for token_id in added:
        if not 0 <= token_id < len(texts) + MAX_ADDED_ROWS:
            raise ValueError(f"the added token {added[token_id].content!r} has the id {token_id}")
    repeated = [text for text, count in Counter(token.content for token in added.values()).items() if count > 1]
    if repeated:
        raise ValueError(f"the added token {repeated[0]!r} has two ids")
    rows += [unused_text(i) for i in range(len(rows), max(added, default=-1) + 1)]
    for token_id, token in added.items():
        rows[token_id] = token.content
    # An added token's text may also be a row of the vocabulary, which no text becomes then.
    of_added = {token.content: token_id for token_id, token in added.items()}
    return [text if of_added.get(text, i) == i else unused_text(i) for i, text in enumerate(rows)]


def _is_valid(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
