from __future__ import annotations

import tokenizers
from tokenizers import processors


def add_sequence_ends(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Makes encoding begin with one token and end with another, by their ids; None adds none."""
    ends = {token_id: backend.id_to_token(token_id) for token_id in (bos_id, eos_id) if token_id is not None}
    if not ends:
        return
    before = [] if bos_id is None else [f"{ends[bos_id]}:0"]
    after = [] if eos_id is None else [f"{ends[eos_id]}:0"]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", *after, *before, "$B:0", *after],
        special_tokens=[(text, token_id) for token_id, text in ends.items()],
    )
