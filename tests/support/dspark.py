"""Tiny checkpoints of models with DSpark's layers, what these draft by jaxis, and by their equations in torch.

The equations are those of the code that DeepSeek publishes with its files; the rounding of entries to fp8 is left out.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from torch.nn import functional

from jaxis.kernels.paged_cache import to_stored
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import HasCache
from jaxis.layers.module import named_modules
from tests.support.deepseek_v41_reference import Attention, Layer, Norm
from tests.support.parity import FAMILIES, Family, checkpoint_folder, reference_model

BLOCK_SIZE, NOISE, NUM_LAYERS = 5, 128, 3
KEYS = {
    **{"dspark_block_size": BLOCK_SIZE, "dspark_noise_token_id": NOISE, "dspark_markov_rank": 12},
    **{"dspark_n_routed_experts": 6, "dspark_num_experts_per_tok": 2, "num_nextn_predict_layers": NUM_LAYERS},
}
# Layers whose inputs (V4.1) or outputs (V4) are read.
READ = {"DeepSeek V4": [1, 3, 2], "DeepSeek V4.1": [6, 4]}
_HEADS = {"DeepSeek V4": ("markov_w1", "markov_w2"), "DeepSeek V4.1": ("embed", "head")}


def family(name: str, **changes: Any) -> Family:
    row = next(each for each in FAMILIES if each.name == name)
    config = {**row.config, **KEYS, **changes, "dspark_target_layer_ids": READ[name]}
    return dataclasses.replace(row, name=f"{name} {changes}", config=config)


class BlockAttention(Attention):
    """Attention of a block's tokens, the first at `shared["position"]`, to the states before it and to all of it."""

    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        config, position = self.config, shared["position"]
        context = [self.rope(row, p) for p, row in enumerate(self.kv_norm(self.wkv(shared["main"])))]
        own = [self.rope(row, position + i) for i, row in enumerate(self.kv_norm(self.wkv(x)))]
        entries = torch.stack([*context[-config.sliding_window :], *own])
        rows = []
        for i, latent in enumerate(self.q_norm(self.wq_a(x))):
            q = self.wq_b(latent).reshape(config.num_attention_heads, config.head_dim)
            if shared["is_v4"]:
                q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + config.rms_norm_eps)
            scores = self.rope(q, position + i) @ entries.T * config.head_dim**-0.5
            weights = torch.cat([scores, self.attn_sink[:, None]], 1).softmax(-1)[:, :-1]
            out = self.rope(weights @ entries, position + i, sign=-1).reshape(config.o_groups, -1)
            matrices = self.wo_a.weight.reshape(config.o_groups, config.o_lora_rank, -1)
            rows.append(self.wo_b(torch.einsum("gi,goi->go", out, matrices).flatten()))
        return torch.stack(rows)


class Stage(Layer):
    """A layer that drafts. V4's blocks read by their own connection's factors, V4.1's by those of the one before."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.attn = BlockAttention(config, index)

    def run(self, x: torch.Tensor, read: torch.Tensor, shared: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        for block, norm in (("attn", self.attn_norm), ("ffn", self.ffn_norm)):
            following, write, mix = self._coefficients(x, block)
            factors = following if shared["is_v4"] else read
            normed = norm((factors[..., None] * x).sum(1))
            out = self.attn(normed, shared) if block == "attn" else self.ffn(normed)
            x = write[..., None] * out[:, None] + torch.einsum("tjk,tje->tke", mix, x)
            read = following
        return x, read


class DSparkReference(torch.nn.Module):
    """The modules `mtp.0` to `mtp.2`, under the published names."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__()
        self.is_v4, self.head = name == "DeepSeek V4", _HEADS[name]
        self.config = config = copy.deepcopy(config)
        config.n_routed_experts = config.dspark_n_routed_experts
        config.num_experts_per_tok = config.dspark_num_experts_per_tok
        number, size, rank = config.num_hidden_layers, config.hidden_size, config.dspark_markov_rank
        config.compress_ratios = [0] * (number + NUM_LAYERS)
        config.kv_source_layer_ids = config.index_source_layer_ids = config.engram_layer_ids = []
        config.candidate_source_layer_id = -1
        if self.is_v4:
            config.qk_rope_head_dim = int(config.head_dim * config.partial_rotary_factor)
            config.rope_theta = 10_000.0
        self.mtp = torch.nn.ModuleList(Stage(config, number + i) for i in range(NUM_LAYERS))
        first, last = self.mtp[0], self.mtp[-1]
        first.main_proj = torch.nn.Linear(len(READ[name]) * size, size, bias=False)
        first.main_norm, last.norm = Norm(size, config.rms_norm_eps), Norm(size, config.rms_norm_eps)
        last.markov_head = torch.nn.ModuleDict(
            {
                self.head[0]: torch.nn.Embedding(config.vocab_size, rank),
                self.head[1]: torch.nn.Linear(rank, config.vocab_size, bias=False),
            }
        )
        last.confidence_head = torch.nn.ModuleDict({"proj": torch.nn.Linear(size + rank, 1, bias=False)})
        if self.is_v4:
            streams = config.hc_mult
            last.hc_head_fn = torch.nn.Parameter(torch.zeros(streams, streams * size))
            last.hc_head_base = torch.nn.Parameter(torch.zeros(streams))
            last.hc_head_scale = torch.nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(3)
            for parameter_name, parameter in self.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                # Chances near a half, so that some blocks are cut and some are not.
                scale = 0.04 if "confidence" in parameter_name else 0.2
                parameter.copy_(("norm" in parameter_name) + scale * noise)

    @torch.no_grad()
    def forward(
        self, embed: torch.nn.Embedding, head: torch.nn.Linear, states: Sequence[torch.Tensor], newest: int
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Returns drafts, logits [B, V] and chances [B] after the newest token; states [T, S, E] are of those before.

        The states are those of the layers that are read, in the order of the layers.
        """
        first, last, streams = self.mtp[0], self.mtp[-1], self.config.hc_mult
        main = first.main_norm(first.main_proj(torch.cat([each.mean(1) for each in states], -1)))
        x = embed(torch.tensor([newest, *[NOISE] * (BLOCK_SIZE - 1)]))[:, None].repeat(1, streams, 1)
        read = torch.zeros(BLOCK_SIZE, streams)
        read[:, 0] = 1
        shared = {"main": main, "position": len(main), "is_v4": self.is_v4}
        for stage in self.mtp:
            x, read = stage.run(x, read, shared)
        if self.is_v4:
            flat = x.flatten(1) * torch.rsqrt(x.flatten(1).square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
            read = torch.sigmoid(flat @ last.hc_head_fn.T * last.hc_head_scale + last.hc_head_base) + self.config.hc_eps
        x = (read[..., None] * x).sum(1)
        logits, drafts, chances = head(last.norm(x)), [], []
        for i in range(BLOCK_SIZE):
            row = last.markov_head[self.head[0]].weight[newest]
            logits[i] += last.markov_head[self.head[1]](row)
            chances.append(torch.sigmoid(last.confidence_head["proj"](torch.cat([x[i], row])))[0])
            newest = int(logits[i].argmax())
            drafts.append(newest)
        return drafts, logits, torch.stack(chances)


@lru_cache
def dspark_reference(name: str, **changes: Any) -> DSparkReference:
    return DSparkReference(name, reference_model(family(name, **changes)).config)


def write_dspark_checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """Saves a family's model, with some other settings, and DSpark's layers, under the published names."""
    saved = Path(checkpoint_folder(family(name, **changes)))
    config, tensors = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    of_draft = {
        key: value.numpy()
        for key, value in dspark_reference(name, **changes).state_dict().items()
        if name != "DeepSeek V4" or not key.endswith("bias_vl")
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | of_draft, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_last_token_dspark_checkpoint(folder: Path) -> Path:
    """Saves a model whose next token follows from the last one alone, with layers whose drafts are as the model's.

    Blocks add 0. The layers' logits are those of the table of pairs of tokens, which has the model's logits.
    """
    rank = 65  # of the embeddings, and one for the estimates
    write_dspark_checkpoint(folder, "DeepSeek V4.1", dspark_markov_rank=rank)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith((".wo_b.weight", ".w2.weight", "engram.wkv.weight", "mtp.2.norm.weight")):
            tensors[key] = np.zeros_like(tensor)
    embed = torch.from_numpy(tensors["embed.weight"])
    normed = functional.rms_norm(embed, embed.shape[1:], torch.from_numpy(tensors["norm.weight"]), 1e-20).numpy()
    tensors["mtp.2.markov_head.embed.weight"] = np.pad(normed, ((0, 0), (0, 1)), constant_values=9.0)
    tensors["mtp.2.markov_head.head.weight"] = np.pad(tensors["head.weight"], ((0, 0), (0, 1)))
    tensors["mtp.2.confidence_head.proj.weight"] = np.eye(1, 64 + rank, 64 + rank - 1, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def reference_block(name: str, tokens: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Drafts behind these tokens, their logits [B, V] and chances [B], by torch."""
    model, read = reference_model(family(name)), sorted(READ[name])
    given = torch.tensor([tokens[:-1]])
    if name == "DeepSeek V4":
        found: dict[int, torch.Tensor] = {}
        hooks = [
            layer.register_forward_hook(lambda _, __, out, i=i: found.update({i: out}))
            for i, layer in enumerate(model.model.layers)
        ]
        model(given, use_cache=False)
        for hook in hooks:
            hook.remove()
        states, embed, head = [found[i][0] for i in read], model.model.embed_tokens, model.lm_head
    else:
        hidden = model(given).hidden_states
        states, embed, head = [hidden[i][0] for i in read], model.embed, model.head
    drafts, logits, chances = dspark_reference(name)(embed, head, states, tokens[-1])
    return drafts, logits.numpy(), chances.numpy()


class WholeBlocks:
    """Drafts by jaxis, of whole sequences: with new caches, in one step each.

    Args:
      model: With layers that draft a block.
      padded: Most tokens; one program serves all lengths.
    """

    def __init__(self, model: Any, padded: int = 64) -> None:
        graph, self._state = nnx.split(model)
        self._padded = padded
        self._caches = _empty_caches(model.draft, padded)

        @jax.jit
        def run(state: nnx.State, caches: Any, input_ids: jax.Array, number: jax.Array) -> Any:
            merged = nnx.merge(graph, state)
            _, hidden, aux = merged(None, input_ids, AttentionMetadata.for_whole_sequences([padded]))
            states = merged.draft.first_states(hidden, aux)
            kept, _ = merged.draft(merged, caches, input_ids, states, _one_sequence(0, number, padded))
            block = _one_sequence(number, merged.draft.block_size, merged.draft.block_size)
            return merged.draft.draft_block(merged, kept, input_ids[number][None], block)[1]

        self._run = run

    def block(self, tokens: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The counterpart of `reference_block`."""
        padded = jnp.asarray([*tokens, *[0] * (self._padded - len(tokens))], jnp.int32)
        block = self._run(self._state, self._caches, padded, jnp.int32(len(tokens) - 1))
        return block.drafts[0].tolist(), np.asarray(block.logits[0]), np.asarray(block.chances[0])

    def __call__(self, tokens: Sequence[int], num_drafts: int) -> tuple[list[int], list[np.ndarray]]:
        """As `WholeDrafts`, without drafts that are wrong nine times out of ten."""
        drafts, logits, chances = self.block(tokens)
        number = min(num_drafts, int((np.cumprod(chances) >= 0.1).sum()))
        return drafts[:number], list(logits[:number])


def _one_sequence(first: Any, number: Any, padded: int) -> AttentionMetadata:
    """Metadata of a step with `number` tokens of one sequence, and rows of padding."""
    return AttentionMetadata(
        input_positions=first + jnp.arange(padded, dtype=jnp.int32),
        block_tables=jnp.arange(20, dtype=jnp.int32)[None],
        seq_lens=jnp.asarray([first + number], jnp.int32),
        query_start_loc=jnp.asarray([0, number], jnp.int32),
        request_distribution=jnp.asarray([0, 0, 1], jnp.int32),
    )


def _empty_caches(part: nnx.Module, padded: int) -> list[Any]:
    caches = []
    for _, module in named_modules(part):
        if isinstance(module, HasCache):
            layout = module.kv_cache_spec.layout(8, jnp.float32)
            caches.append(layout.cache(to_stored(jnp.full((padded, *layout.shape), jnp.nan), layout.dtype)))
    return caches
