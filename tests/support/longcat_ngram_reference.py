"""LongCat-Flash-Lite in torch, which transformers lacks: its LongCat-Flash over embeddings of n-grams."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LongcatFlashForCausalLM


class NgramEmbeddings(nn.Module):
    """Ids are hashed one by one, in Python's integers, from the text that each stands in."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab_size, self.end = config.vocab_size, config.eos_token_id
        self.splits, self.order = config.emb_split_num, config.emb_neighbor_num
        number = self.splits * (self.order - 1)
        self.base = base = int(config.ngram_vocab_size_ratio * config.vocab_size)
        width = config.hidden_size // number
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedders = nn.ModuleList(nn.Embedding(base + 2 * i + 1, width) for i in range(number))
        self.post_projs = nn.ModuleList(nn.Linear(width, config.hidden_size, bias=False) for _ in range(number))

    def _rows(self, ids: list[int], order: int, number: int) -> list[int]:
        """The row of each id's n-gram in a table of this many rows."""
        text: list[int] = []
        rows = []
        for token in ids:
            text.append(token)
            digits = enumerate(text[::-1][:order])
            rows.append(sum(each * self.vocab_size**distance for distance, each in digits) % number)
            if token == self.end:
                text = []
        return rows

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(input_ids)
        for i, (embedder, project) in enumerate(zip(self.embedders, self.post_projs, strict=True)):
            number = self.base + 2 * i + 1
            rows = [self._rows(ids, 2 + i // self.splits, number) for ids in input_ids.tolist()]
            x = x + project(embedder(torch.tensor(rows)))
        return x / (1 + len(self.embedders))


class LongcatNgramReference(LongcatFlashForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        decoder: Any = self.model
        decoder.embed_tokens = NgramEmbeddings(config)
