"""Ling 2.5 in torch, which transformers lacks: its Ling 3 without gates of latent attention, and lightning attention as
in the makers' code."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import BailingHybridForCausalLM


def _slopes(num_heads: int) -> list[float]:
    if math.log2(num_heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [start ** (i + 1) for i in range(num_heads)]
    power = 2 ** math.floor(math.log2(num_heads))
    return _slopes(power) + _slopes(2 * power)[::2][: num_heads - power]


class LightningAttention(nn.Module):
    """One token after another."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.heads, self.size = config.num_attention_heads, config.linear_head_dim
        inner = self.heads * self.size
        self.query_key_value = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.query_layernorm = nn.RMSNorm(self.size, eps=config.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(self.size, eps=config.rms_norm_eps)
        self.g_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.g_norm = nn.RMSNorm(inner)  # only its weight is used: parts are normed one by one
        self.dense = nn.Linear(inner, config.hidden_size, bias=False)
        self.eps, self.groups = config.rms_norm_eps, config.group_norm_size
        share = 1 - (layer_idx - 1) / (config.num_hidden_layers - 1) + 1e-5
        self.rates: torch.Tensor = torch.tensor(_slopes(self.heads)) * share
        self.rotary_dim = self.size // 2
        self.theta = config.rope_parameters["rope_theta"]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = self.theta ** (-torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        angles = torch.arange(x.shape[1])[:, None, None] * frequencies
        half = self.rotary_dim // 2
        first, second, rest = x.split([half, half, self.size - self.rotary_dim], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        batch, length = hidden_states.shape[:2]
        qkv = self.query_key_value(hidden_states).float().view(batch, length, 3, self.heads, self.size)
        q, k, v = qkv.unbind(2)
        q, k = self._rotated(self.query_layernorm(q)), self._rotated(self.key_layernorm(k))
        decays = torch.exp(-self.rates)[:, None, None]
        state = torch.zeros(batch, self.heads, self.size, self.size)
        outputs = []
        for t in range(length):
            state = decays * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * self.size**-0.5, state))
        grouped = torch.stack(outputs, dim=1).view(batch, length, self.groups, -1)
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        normed = grouped.view(batch, length, -1) * self.g_norm.weight
        return self.dense(normed.to(hidden_states.dtype) * self.g_proj(hidden_states).sigmoid())


class _Open(nn.Module):
    """Logits of gates that are 1."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((*x.shape[:-1], self.num_heads), torch.inf)


class Ling25Reference(BailingHybridForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        layers: Any = self.model.layers
        for i, layer in enumerate(layers):
            if config.layer_types[i] == "linear_attention":
                layer.self_attn = LightningAttention(config, i)
            else:
                layer.self_attn.g_proj = _Open(config.num_attention_heads)
