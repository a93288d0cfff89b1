"""In PyTorch: GLM-4.5's layer that predicts later tokens, and an EAGLE-3 head, with the names of published files.

Both read, in the row of a token, the token that follows. `chain` is how they are trained and how they draft: each
prediction after the first reads the states that the layer itself returned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from transformers import Glm4MoeConfig, LlamaConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


class PredictionLayer(Glm4MoeDecoderLayer):
    """The model's layer `num_hidden_layers`, of arXiv:2412.19437."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        size = config.hidden_size
        self.enorm, self.hnorm = (Glm4MoeRMSNorm(size, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": Glm4MoeRMSNorm(size, eps=config.rms_norm_eps)})
        self._rotary = Glm4MoeRotaryEmbedding(config)

    def predict(self, embeddings: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and states [R, T, E] -> what the model's head reads, and the next prediction's states."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(states)], dim=-1))
        positions = torch.arange(x.shape[1])[None]
        x = super().forward(x, position_embeddings=self._rotary(x, positions), attention_mask=None)
        x = self.shared_head["norm"](x)
        return x, x


class Eagle3Attention(LlamaAttention):
    """Llama's, of inputs twice as wide."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self, name).out_features
            setattr(self, name, nn.Linear(2 * config.hidden_size, outputs, bias=False))


class Eagle3Layer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        for name in norms:
            setattr(self, name, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.self_attn, self.mlp = Eagle3Attention(config), LlamaMLP(config)


class Eagle3Head(nn.Module):
    """arXiv:2503.01840, as SpecForge saves it: `d2t` holds what is added to an index of the draft vocabulary."""

    def __init__(self, config: LlamaConfig, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[draft_ids] = True
        self.register_buffer("t2d", is_drafted)
        self._rotary = LlamaRotaryEmbedding(config)

    def predict(self, embeddings: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PredictionLayer.predict`; the states have been through `fc`."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(states)], dim=-1)
        positions = self._rotary(both, torch.arange(both.shape[1])[None])
        attended, _ = layer.self_attn(both, position_embeddings=positions, attention_mask=None)
        x = states + attended
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), x


def chain(
    layer: PredictionLayer | Eagle3Head, embeddings: torch.Tensor, states: torch.Tensor, depth: int
) -> Iterator[torch.Tensor]:
    """What the head reads for each of `depth` predictions, [R, T - i, E] of the i-th: row t's are of token t + 1 + i.

    Args:
      layer: What predicts.
      embeddings: [R, T, E] of a document's tokens.
      states: [R, T, E], what the model gives the layer for each.
      depth: Number of predictions.
    """
    for i in range(1, depth + 1):
        length = embeddings.shape[1] - i
        read, states = layer.predict(embeddings[:, i:], states[:, :length])
        yield read


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits [R, T, V] with labels i64 [R, T]; label -100 does not count."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
