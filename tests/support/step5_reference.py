"""Step 5 in torch, which transformers lacks: its Step 3.7 with an indexer, from the equations of vLLM's model."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7Attention,
    Step3p7ForConditionalGeneration,
    Step3p7RMSNorm,
)


def _rotated(x: torch.Tensor, theta: float, rotary_dim: int) -> torch.Tensor:
    """Heads [T, H, D], whose first dimensions are rotated by their position, in halves."""
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    first, second, rest = x.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _add_indexer(attention: Any, sparse: dict[str, Any]) -> None:
    config, heads, size = attention.config, sparse["sparse_indexer_num_heads"], sparse["proxy_dim"]
    for name, rows in (("q", heads * size), ("k", size), ("z", size), ("w", heads)):
        setattr(attention, f"sparse_indexer_{name}", nn.Linear(config.hidden_size, rows, bias=False))
    attention.sparse_indexer_q_norm = Step3p7RMSNorm(size, eps=config.rms_norm_eps)
    attention.sparse_indexer_k_norm = nn.LayerNorm(size, eps=config.rms_norm_eps)
    attention.ssmax_s = nn.Parameter(torch.zeros(attention.num_heads))


def _selected(attention: Any, x: torch.Tensor, sparse: dict[str, Any], theta: float) -> torch.Tensor:
    """bool [G, T, T]: for each provider group, what each token of x [T, E] attends to."""
    groups, size, region = sparse["num_provider_groups"], sparse["proxy_dim"], sparse["region_block_size"]
    q = attention.sparse_indexer_q_norm(attention.sparse_indexer_q(x).view(len(x), -1, size))
    k = attention.sparse_indexer_k_norm(attention.sparse_indexer_k(x))[:, None]
    q, k = (_rotated(each, theta, sparse["sparse_indexer_rope_dim"]) for each in (q, k))
    z, w = attention.sparse_indexer_z(x), attention.sparse_indexer_w(x)
    closed = len(x) // region
    keys, logits = (each[: closed * region].view(closed, region, size) for each in (k[:, 0], z))
    summaries = (logits.softmax(1) * keys).sum(1)
    of_heads = torch.einsum("thd,wd->thw", q, summaries).relu() * w[..., None]
    scores = torch.stack([part.sum(1) for part in of_heads.chunk(groups, dim=1)], dim=1)
    seen = torch.zeros(groups, len(x), len(x), dtype=torch.bool)
    for t in range(len(x)):
        own = t // region
        seen[:, t, own * region : t + 1] = True
        for g in range(groups):
            for best in scores[t, g, :own].topk(min(own, sparse["topk"])).indices:
                seen[g, t, best * region : (best + 1) * region] = True
    return seen


class Step5Reference(Step3p7ForConditionalGeneration):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = config.text_config
        sparse, theta = text.sparse_config, text.rope_parameters["full_attention"]["rope_theta"]
        decoder: Any = self.model.language_model
        for layer in decoder.layers:
            attention: Any = layer.self_attn
            if not attention.is_local_attention:
                _add_indexer(attention, sparse)
                attention.forward = types.MethodType(_forward(sparse, theta), attention)


def _forward(sparse: dict[str, Any], theta: float) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor, *, attention_mask: Any = None, **options: Any) -> Any:
        del attention_mask
        seen = torch.stack([_selected(self, x, sparse, theta) for x in hidden_states])
        seen = seen.repeat_interleave(self.num_heads // seen.shape[1], dim=1)
        mask = torch.zeros_like(seen, dtype=hidden_states.dtype).masked_fill(
            ~seen, torch.finfo(hidden_states.dtype).min
        )
        return Step3p7Attention.forward(self, hidden_states, attention_mask=mask, **options)

    return forward
