"""Kimi K3 in torch, which transformers lacks: one token after the other, written from the equations of mlx-lm's model.

Its config is Kimi Linear's with the keys of Kimi K3's; tensors have the names of the published files.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class FeedForward(nn.Module):
    def __init__(self, config: Any, size_in: int, size: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names, self.betas = names, (config.activation_situ_beta, config.activation_situ_linear_beta)
        for name, shape in zip(names, ((size_in, size), (size_in, size), (size, size_in)), strict=True):
            setattr(self, name, _linear(*shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        (beta, linear_beta), g = self.betas, gate(x)
        return down(beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(up(x) / linear_beta))


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, size, latent = config, config.hidden_size, config.routed_expert_hidden_size
        self.gate = _linear(size, config.num_experts)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        names = ("w1", "w3", "w2")
        width = config.moe_intermediate_size
        self.experts = nn.ModuleList(FeedForward(config, latent, width, names) for _ in range(config.num_experts))
        self.routed_expert_down_proj, self.routed_expert_up_proj = _linear(size, latent), _linear(latent, size)
        self.routed_expert_norm = Norm(latent, config.rms_norm_eps)
        shared = width * config.num_shared_experts
        self.shared_experts = FeedForward(config, size, shared, ("gate_proj", "up_proj", "down_proj"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.config.num_experts_per_token).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor
        latent = self.routed_expert_down_proj(x)
        rows = [
            sum(weights[t, k] * self.experts[int(chosen[t, k])](latent[t]) for k in range(chosen.shape[1]))
            for t in range(len(x))
        ]
        return self.routed_expert_up_proj(self.routed_expert_norm(torch.stack(rows))) + self.shared_experts(x)


class DeltaAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        given = config.linear_attn_config
        self.heads, self.dim, self.bound = given["num_heads"], given["head_dim"], given["gate_lower_bound"]
        size, inner = config.hidden_size, self.heads * self.dim
        for name in "qkv":
            setattr(self, f"{name}_proj", _linear(size, inner))
            conv = nn.Conv1d(inner, inner, given["short_conv_kernel_size"], groups=inner, bias=False)
            setattr(self, f"{name}_conv1d", conv)
        self.f_a_proj, self.f_b_proj = _linear(size, self.dim), _linear(self.dim, inner)
        self.b_proj, self.g_proj, self.o_proj = _linear(size, self.heads), _linear(size, inner), _linear(inner, size)
        # Padded, as in the published files.
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(self.heads + 5)), nn.Parameter(torch.zeros(inner))
        self.o_norm = Norm(self.dim, config.rms_norm_eps)

    def _convolved(self, name: str, x: torch.Tensor) -> torch.Tensor:
        conv = getattr(self, f"{name}_conv1d")
        rows = functional.pad(getattr(self, f"{name}_proj")(x).T, (conv.kernel_size[0] - 1, 0))
        return functional.silu(conv(rows[None])[0].T).reshape(len(x), self.heads, self.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._convolved(name, x) for name in "qkv")
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        logits = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).reshape(len(x), self.heads, self.dim)
        decay = torch.exp(self.bound * torch.sigmoid(self.A_log[: self.heads].exp()[:, None] * logits))
        beta, state, out = torch.sigmoid(self.b_proj(x)), torch.zeros(self.heads, self.dim, self.dim), []
        for t in range(len(x)):
            state = state * decay[t][..., None]
            wrong = v[t] - (k[t][..., None] * state).sum(1)
            state = state + k[t][..., None] * (beta[t][:, None] * wrong)[:, None]
            out.append((q[t][..., None] * state).sum(1) * self.dim**-0.5)
        gates = torch.sigmoid(self.g_proj(x)).reshape(len(x), self.heads, self.dim)
        return self.o_proj((self.o_norm(torch.stack(out)) * gates).flatten(1))


class LatentAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, size, heads = config, config.hidden_size, config.num_attention_heads
        self.sizes = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        nope, extra, value = self.sizes
        self.q_a_proj, self.q_a_layernorm = _linear(size, config.q_lora_rank), Norm(config.q_lora_rank, 1e-6)
        self.q_b_proj = _linear(config.q_lora_rank, heads * (nope + extra))
        self.kv_a_proj_with_mqa = _linear(size, config.kv_lora_rank + extra)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, 1e-6)
        self.kv_b_proj = _linear(config.kv_lora_rank, heads * (nope + value))
        self.g_proj, self.o_proj = _linear(size, heads * value), _linear(heads * value, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (nope, extra, value), count, heads = self.sizes, len(x), self.config.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).reshape(count, heads, -1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, extra], -1)
        k, v = self.kv_b_proj(self.kv_a_layernorm(latent)).reshape(count, heads, -1).split([nope, value], -1)
        k = torch.cat([k, shared[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("thd,shd->hts", q, k) * (nope + extra) ** -0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.starts_block = index % config.attn_res_block_size == 0
        is_linear = index + 1 in config.linear_attn_config["kda_layers"]
        self.self_attn = DeltaAttention(config) if is_linear else LatentAttention(config)
        self.is_sparse = index >= config.first_k_dense_replace
        if self.is_sparse:
            self.block_sparse_moe = Experts(config)
        else:
            self.mlp = FeedForward(config, size, config.intermediate_size, ("gate_proj", "up_proj", "down_proj"))
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            setattr(self, name, Norm(size, epsilon))
        self.self_attention_res_proj, self.mlp_res_proj = _linear(size, 1), _linear(size, 1)

    def forward(self, x: torch.Tensor, blocks: list[torch.Tensor]) -> torch.Tensor:
        read = mixed([*blocks, x], self.self_attention_res_norm, self.self_attention_res_proj)
        attended = self.self_attn(self.input_layernorm(read))
        if self.starts_block:
            blocks.append(x)
            x = attended
        else:
            x = x + attended
        read = self.post_attention_layernorm(mixed([*blocks, x], self.mlp_res_norm, self.mlp_res_proj))
        return x + (self.block_sparse_moe(read) if self.is_sparse else self.mlp(read))


def mixed(vectors: list[torch.Tensor], norm: Norm, proj: nn.Linear) -> torch.Tensor:
    stacked = torch.stack(vectors)
    return (proj(norm(stacked)).softmax(0) * stacked).sum(0)


class Decoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm, self.output_attn_res_norm = Norm(size, config.rms_norm_eps), Norm(size, config.rms_norm_eps)
        self.output_attn_res_proj = _linear(size, 1)

    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """Inputs of the layers, with the residuals stored as jaxis does, and the normed output; each [1, T, ...]."""
        x, blocks, states = self.embed_tokens(input_ids), [], []
        room = -(-len(self.layers) // self.config.attn_res_block_size)
        for layer in self.layers:
            states.append(torch.stack([*blocks, *[torch.zeros_like(x)] * (room - len(blocks)), x], dim=1)[None])
            x = layer(x, blocks)
        return [*states, self.norm(mixed([*blocks, x], self.output_attn_res_norm, self.output_attn_res_proj))[None]]


class KimiK3Reference(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.KimiLinearConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model, self.lm_head = Decoder(config), _linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        *states, last = self.model(input_ids[0])
        return CausalLMOutput(logits=self.lm_head(last), hidden_states=(*states, last))
