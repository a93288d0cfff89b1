"""DeepSeek V4.1 in torch, which transformers lacks: token after token, from the equations of public ports.

Those are mlx-lm's model, vLLM's, and NeMo AutoModel's (for n-grams). What they round to fp8 and fp4 in caches and
index keys, as the model was trained, is not rounded. Tensors have the names of the published files.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutput

# transformers would change it in a config.
ROPE_SCALING = {
    **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    "original_max_position_embeddings": 256,
}


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


def _unit(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(size)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * _unit(x, self.epsilon)


class Rope:
    """Rotates the last dimensions, in neighbouring pairs; YaRN's frequencies, but not its factor."""

    def __init__(self, config: Any, compressed: bool) -> None:
        self.size = size = config.qk_rope_head_dim
        base = config.compress_rope_theta if compressed else config.rope_theta
        frequencies = [base ** (-i / size) for i in range(0, size, 2)]
        if compressed:
            length = ROPE_SCALING["original_max_position_embeddings"]

            def dimension(turns: float) -> float:
                return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

            low = max(math.floor(dimension(ROPE_SCALING["beta_fast"])), 0)
            high = min(math.ceil(dimension(ROPE_SCALING["beta_slow"])), size - 1)
            for i, frequency in enumerate(frequencies):
                share = min(max((i - low) / max(high - low, 1e-3), 0), 1)
                frequencies[i] = frequency / ROPE_SCALING["factor"] * share + frequency * (1 - share)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float64)

    def __call__(self, x: torch.Tensor, position: int, sign: int = 1) -> torch.Tensor:
        kept, last = x[..., : -self.size], x[..., -self.size :]
        angles = (sign * position * self.frequencies).to(x.dtype)
        cos, sin, a, b = angles.cos(), angles.sin(), last[..., ::2], last[..., 1::2]
        return torch.cat([kept, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)


class Compressor(nn.Module):
    def __init__(self, config: Any, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = _linear(config.hidden_size, config.head_dim)
        if ratio > 1:
            self.wgate = _linear(config.hidden_size, config.head_dim)
        self.norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = range(0, len(x) - self.ratio + 1, self.ratio)
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        rows = [(self.wgate(x[g : g + self.ratio]).softmax(0) * self.wkv(x[g : g + self.ratio])).sum(0) for g in groups]
        return self.norm(torch.stack(rows)) if rows else x.new_zeros(0, self.wkv.out_features)


class Indexer(nn.Module):
    def __init__(self, config: Any, makes_keys: bool) -> None:
        super().__init__()
        self.config, size = config, config.index_head_dim
        self.wq_b = _linear(config.q_lora_rank, config.index_n_heads * size)
        self.weights_proj = _linear(config.hidden_size, config.index_n_heads)
        if makes_keys:
            self.wk, self.k_norm = _linear(config.head_dim, size), Norm(size, config.rms_norm_eps)

    def scores(
        self, x: torch.Tensor, latent: torch.Tensor, position: int, keys: torch.Tensor, rope: Rope
    ) -> torch.Tensor:
        """Scores of keys [C, D] for one token."""
        heads, size = self.config.index_n_heads, self.config.index_head_dim
        q = rope(self.wq_b(latent).reshape(heads, size), position)
        return self.weights_proj(x) @ torch.relu(q @ keys.T) * (heads * size) ** -0.5


class Attention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.config, size, heads, dim = config, config.hidden_size, config.num_attention_heads, config.head_dim
        self.ratio, epsilon = config.compress_ratios[index], config.rms_norm_eps
        self.wq_a, self.q_norm = _linear(size, config.q_lora_rank), Norm(config.q_lora_rank, epsilon)
        self.wq_b = _linear(config.q_lora_rank, heads * dim)
        self.wkv, self.kv_norm = _linear(size, dim), Norm(dim, epsilon)
        self.wo_a = _linear(heads * dim // config.o_groups, config.o_groups * config.o_lora_rank)
        self.wo_b = _linear(config.o_groups * config.o_lora_rank, size)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        makes_entries = index in config.kv_source_layer_ids
        if makes_entries:
            self.compressor = Compressor(config, self.ratio)
        if index in config.index_source_layer_ids:
            self.indexer = Indexer(config, makes_entries)
        source = config.candidate_source_layer_id
        self.makes_candidates, self.has_candidates = index == source, 0 <= source < index
        self.rope = Rope(config, compressed=self.ratio > 0)

    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        latent = self.q_norm(self.wq_a(x))
        own = torch.stack([self.rope(row, p) for p, row in enumerate(self.kv_norm(self.wkv(x)))])
        if hasattr(self, "compressor"):
            latents = self.compressor(x)
            self._keep(shared, "entries", latents)
            self._keep(shared, "keys", self.indexer.k_norm(self.indexer.wk(latents)))
        if hasattr(self, "indexer"):
            self._select(x, latent, shared)
        return torch.stack([self._one(p, latent[p], own, shared) for p in range(len(x))])

    def _keep(self, shared: dict[str, Any], name: str, rows: torch.Tensor) -> None:
        rotated = [self.rope(row, g * self.ratio) for g, row in enumerate(rows)]
        shared[name] = torch.stack(rotated) if rotated else rows

    def _select(self, x: torch.Tensor, latent: torch.Tensor, shared: dict[str, Any]) -> None:
        config, chosen, candidates = self.config, [], []
        for p in range(len(x)):
            seen = list(range((p + 1) // self.ratio))
            scores = self.indexer.scores(x[p], latent[p], p, shared["keys"][: len(seen)], self.rope)
            among = [g for g in seen if g in shared["candidates"][p]] if self.has_candidates else seen
            best = sorted(among, key=lambda g: (-float(scores[g]), g))
            chosen.append(sorted(best[: config.index_topk]))
            if self.makes_candidates and seen:
                size = config.candidate_block_size
                blocks = {g // size: [h for h in seen if h // size == g // size] for g in seen}
                order = sorted(blocks, key=lambda b: (b != max(blocks), -float(scores[blocks[b]].max()), b))
                candidates.append({g for b in order[: config.candidate_topk_blocks] for g in blocks[b]})
            else:
                candidates.append(set())
        shared["chosen"] = chosen
        if self.makes_candidates:
            shared["candidates"] = candidates

    def _one(self, p: int, latent: torch.Tensor, own: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        config = self.config
        q = self.rope(self.wq_b(latent).reshape(config.num_attention_heads, config.head_dim), p)
        entries = own[max(0, p + 1 - config.sliding_window) : p + 1]
        if self.ratio and shared["chosen"][p]:
            entries = torch.cat([entries, shared["entries"][shared["chosen"][p]]])
        scores = torch.cat([q @ entries.T * config.head_dim**-0.5, self.attn_sink[:, None]], 1)
        out = self.rope(scores.softmax(-1)[:, :-1] @ entries, p, sign=-1)
        groups = out.reshape(config.o_groups, -1)
        matrices = self.wo_a.weight.reshape(config.o_groups, config.o_lora_rank, -1)
        return self.wo_b(torch.einsum("gi,goi->go", groups, matrices).flatten())


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, width, self.limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        self.w1, self.w3, self.w2 = _linear(size, width), _linear(size, width), _linear(width, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(-self.limit, self.limit)
        return self.w2(functional.silu(gate) * up)


class Gate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.bias, self.bias_vl = (nn.Parameter(torch.zeros(config.n_routed_experts)) for _ in range(2))


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.gate = config, Gate(config)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.n_routed_experts))
        self.shared_experts = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = []
        for row in x:
            scores = functional.softplus(self.gate.weight @ row).sqrt()
            chosen = (scores + self.gate.bias).topk(self.config.num_experts_per_tok).indices
            total = scores[chosen].sum() + 1e-20
            routed = sum(scores[i] / total * self.experts[int(i)](row) for i in chosen)
            out.append(routed * self.config.routed_scaling_factor + self.shared_experts(row))
        return torch.stack(out)


class Table(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))


def _primes(smallest: int) -> Any:
    number = smallest
    while True:
        if all(number % divisor for divisor in range(2, number)):
            yield number
        number += 1


class Engram(nn.Module):
    """Hashes are computed with Python's integers; each id is a class by itself."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.config, self.number = config, config.engram_layer_ids.index(index)
        size, streams, self.order = config.hidden_size, config.hc_mult, config.engram_max_ngram_size
        columns = (self.order - 1) * config.engram_n_heads
        self.embed = Table(config.engram_num_embeddings[self.number], config.engram_head_dim)
        self.wkv = _linear(columns * config.engram_head_dim, (streams + 1) * size)
        self.q_weight, self.k_weight = (nn.Parameter(torch.ones(streams, size)) for _ in range(2))
        bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
        random = np.random.default_rng(10007 * index)
        self.factors = [int(n) * 2 + 1 for n in random.integers(0, bound, self.order, dtype=np.int64)]
        primes = _primes(config.engram_vocab_size)
        self.primes = [next(primes) for _ in range(columns * (self.number + 1))][columns * self.number :]

    def rows(self, ids: list[int], p: int) -> list[int]:
        back = [ids[p - i] if p >= i else self.config.engram_pad_token_id for i in range(self.order)]
        found, value, offset = [], back[0] * self.factors[0], 0
        for i in range(1, self.order):
            value ^= back[i] * self.factors[i]
            for head in range(self.config.engram_n_heads):
                prime = self.primes[(i - 1) * self.config.engram_n_heads + head]
                found.append(value % prime + offset)
                offset += prime
        return found

    def forward(self, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        size, epsilon = x.shape[-1], self.config.rms_norm_eps
        rows = torch.tensor([self.rows(ids, p) for p in range(len(x))])
        found = self.wkv(self.embed.weight[rows].flatten(1))
        key, value = found[:, :-size].unflatten(-1, (-1, size)), found[:, -size:]
        dot = (_unit(x, epsilon) * self.q_weight * _unit(key, epsilon) * self.k_weight).sum(-1) * size**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
        return x + gate[..., None] * value[:, None]


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.config, size, streams = config, config.hidden_size, config.hc_mult
        self.attn, self.ffn = Attention(config, index), Experts(config)
        self.attn_norm, self.ffn_norm = (Norm(size, config.rms_norm_eps) for _ in range(2))
        for block in ("attn", "ffn"):
            count = (2 + streams) * streams
            for part, shape in (("fn", (count, streams * size)), ("base", (count,)), ("scale", (3,))):
                setattr(self, f"hc_{block}_{part}", nn.Parameter(torch.zeros(shape)))
        if index in config.engram_layer_ids:
            self.engram = Engram(config, index)

    def _coefficients(self, x: torch.Tensor, block: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, count = self.config, self.config.hc_mult
        fn, base, scale = (getattr(self, f"hc_{block}_{part}") for part in ("fn", "base", "scale"))
        read, write, mix = (_unit(x.flatten(1), config.rms_norm_eps) @ fn.T).split([count, count, count**2], -1)
        read = torch.sigmoid(read * scale[0] + base[:count]) + config.hc_eps
        write = 2 * torch.sigmoid(write * scale[1] + base[count : 2 * count])
        mix = (mix * scale[2] + base[2 * count :]).unflatten(-1, (count, count)).softmax(-1) + config.hc_eps
        mix = mix / (mix.sum(1, keepdim=True) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(2, keepdim=True) + config.hc_eps)
            mix = mix / (mix.sum(1, keepdim=True) + config.hc_eps)
        return read, write, mix

    def forward(
        self, x: torch.Tensor, read: torch.Tensor, ids: list[int], shared: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if hasattr(self, "engram"):
            x = self.engram(x, ids)
        for block, norm, run in (
            ("attn", self.attn_norm, lambda u: self.attn(u, shared)),
            ("ffn", self.ffn_norm, self.ffn),
        ):
            following, write, mix = self._coefficients(x, block)
            out = run(norm((read[..., None] * x).sum(1)))
            x = write[..., None] * out[:, None] + torch.einsum("tjk,tje->tke", mix, x)
            read = following
        return x, read


class DeepseekV41Reference(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = _linear(config.hidden_size, config.vocab_size)
        self.post_init()
        self.generation_config.use_cache = False

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        ids, shared, states = input_ids[0].tolist(), {}, []
        x = self.embed(input_ids[0])[:, None].repeat(1, self.config.hc_mult, 1)
        read = torch.zeros_like(x[..., 0])
        read[:, 0] = 1
        for layer in self.layers:
            states.append(x[None])
            x, read = layer(x, read, ids, shared)
        last = self.norm((read[..., None] * x).sum(1))[None]
        return CausalLMOutput(logits=self.head(last), hidden_states=(*states, last))
