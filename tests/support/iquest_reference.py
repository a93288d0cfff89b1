"""IQuest-Coder Loop in torch, which transformers lacks: Llama's layers, run several times, from published equations.

Later passes mix two contexts by a gate, the product of query and weight: the first pass's, and a window of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


class Gate(nn.Module):
    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(heads, dim)), nn.Parameter(torch.zeros(heads))


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, inner = config, config.num_attention_heads * config.head_dim
        for name, heads in (("q", config.num_attention_heads), *((name, config.num_key_value_heads) for name in "kv")):
            setattr(self, f"{name}_proj", nn.Linear(config.hidden_size, heads * config.head_dim, bias=False))
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, gate: Gate, first: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        dim, count = self.config.head_dim, len(x)
        q, k, v = (getattr(self, f"{name}_proj")(x).reshape(count, -1, dim).transpose(0, 1) for name in "qkv")
        theta = self.config.rope_parameters["rope_theta"]
        angles = torch.outer(torch.arange(count).to(x.dtype), theta ** -(torch.arange(0, dim, 2).to(x.dtype) / dim))
        q, k = (_rotated(each, torch.cat([angles] * 2, -1)) for each in (q, k))
        if first is None:
            out, first = _attend(q, k, v, math.inf), [k, v]
        else:
            share = (torch.einsum("htd,hd->ht", q, gate.weight) + gate.bias[:, None]).sigmoid()[..., None]
            near = _attend(q, k, v, self.config.loop_window_size)
            out = share * _attend(q, *first, math.inf) + (1 - share) * near
        return self.o_proj(out.transpose(0, 1).reshape(count, -1)), first


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: float) -> torch.Tensor:
    k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    return scores.masked_fill((distance < 0) | (distance >= reach), -math.inf).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))


class Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, layers = config, range(config.num_hidden_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in layers)
        self.gate_projections = nn.ModuleList(Gate(config.num_attention_heads, config.head_dim) for _ in layers)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Inputs of each run of a layer, and the normed output; each [1, T, E]."""
        x, states = self.embed_tokens(input_ids), []
        kept: list[Any] = [None] * len(self.layers)
        for _ in range(self.config.loop_num):
            for i, (layer, gate) in enumerate(zip(self.layers, self.gate_projections, strict=True)):
                states.append(x[None])
                out, kept[i] = layer.self_attn(layer.input_layernorm(x), gate, kept[i])
                x = x + out
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return [*states, self.norm(x)[None]]


class IQuestLoopReference(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model, self.lm_head = Decoder(config), nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        *states, last = self.model(input_ids[0])
        return CausalLMOutput(logits=self.lm_head(last), hidden_states=(*states, last))
