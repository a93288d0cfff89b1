"""LongCat-Flash-Lite and 2.0 in torch, which transformers lacks: its LongCat-Flash over embeddings of n-grams.

2.0's attention to selected tokens is that of `Longcat2` in SGLang and mlx-lm.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import LongcatFlashForCausalLM
from transformers.models.longcat_flash import modeling_longcat_flash as reference


class NgramEmbeddings(nn.Module):
    """Ids are hashed one by one, in Python's integers, from the text that each stands in."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab_size, self.end = config.vocab_size, config.eos_token_id
        of = {re.sub("^(oe|emb|ngram)_", "", key): value for key, value in config.to_dict().items()}
        self.splits, self.order = of["split_num"], of["neighbor_num"]
        number = self.splits * (self.order - 1)
        self.base = base = int(of["vocab_size_ratio"] * config.vocab_size)
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


class SelectingAttention(reference.LongcatFlashMLA):
    """Attends to the tokens that its own indexer selects, or that of the attention before it."""

    def __init__(self, config: Any, layer_idx: int, before: SelectingAttention | None) -> None:
        super().__init__(config, layer_idx)
        self.q_a_layernorm.variance_epsilon = self.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
        self.before = [before]  # no module of this one
        self.selected = torch.empty(0)
        if before is None:
            heads, size = config.index_n_heads, config.index_head_dim
            self.indexer = nn.ModuleDict(
                {
                    "wq_b": nn.Linear(config.q_lora_rank, heads * size, bias=False),
                    "wk": nn.Linear(config.hidden_size, size, bias=False),
                    "k_norm": reference.LongcatFlashRMSNorm(size, eps=config.rms_norm_eps),
                    "weights_proj": nn.Linear(config.hidden_size, heads, bias=False),
                }
            )

    def _select(self, x: torch.Tensor, cos_and_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The tokens bool [T, T] that each token attends to, from x [1, T, E]."""
        config, parts, rotated = self.config, self.indexer, self.qk_rope_head_dim
        q = (
            parts["wq_b"](self.q_a_layernorm(self.q_a_proj(x)))
            .unflatten(-1, (config.index_n_heads, -1))
            .transpose(1, 2)
        )
        k = parts["k_norm"](parts["wk"](x))[:, None]
        turned = reference.apply_rotary_pos_emb_interleave(q[..., :rotated], k[..., :rotated], *cos_and_sin)
        q, k = (torch.cat((front, whole[..., rotated:]), -1)[0] for front, whole in zip(turned, (q, k), strict=True))
        scores = torch.einsum("th,hts->ts", parts["weights_proj"](x)[0], (q @ k.transpose(1, 2)).relu())
        selected = torch.zeros_like(scores, dtype=torch.bool)
        for t in range(len(scores)):
            always = [s for s in range(t + 1) if s < config.index_init_tokens or s > t - config.index_local_tokens]
            others = [s for s in scores[t].argsort(descending=True, stable=True).tolist() if s <= t and s not in always]
            selected[t, [*always, *others][: config.index_topk]] = True
        return selected

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **options: Any
    ) -> Any:
        del attention_mask
        before = self.before[0]
        self.selected = self._select(hidden_states, position_embeddings) if before is None else before.selected
        mask = torch.where(self.selected, 0.0, -torch.inf).to(hidden_states.dtype)[None, None]
        return super().forward(hidden_states, position_embeddings, mask, **options)


class Longcat2Reference(LongcatNgramReference):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            first = SelectingAttention(config, 2 * i, None)
            layer.self_attn = nn.ModuleList([first, SelectingAttention(config, 2 * i + 1, first)])
