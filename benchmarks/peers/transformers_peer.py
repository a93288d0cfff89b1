"""Hugging Face transformers: eager PyTorch with its default attention and cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jaxis.bench.run import BatchRun, Load, random_prompts

if TYPE_CHECKING:
    from jaxis.bench.cost import DecodeCost

WARM_UP = Load(batch_size=1, input_len=16, output_len=4)


class TransformersPeer:
    """See the package. `arguments`: "dtype", "float32" or "bfloat16"; "threads"."""

    def __init__(self, model: Path, arguments: dict[str, Any], _loads: Sequence[Load]) -> None:
        torch.set_num_threads(arguments["threads"])
        dtype = getattr(torch, arguments["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._itemsize = dtype.itemsize

    @property
    def decode_cost(self) -> DecodeCost:
        from jaxis.bench.cost import decode_cost_of, expert_share

        config = self._model.config
        weights = {name: p.numel() * p.element_size() for name, p in self._model.named_parameters()}
        kv_numbers = 2 * config.num_key_value_heads * config.head_dim
        if hasattr(config, "kv_lora_rank"):  # its cache holds latents too
            kv_numbers = config.kv_lora_rank + config.qk_rope_head_dim
        kv_bytes = config.num_hidden_layers * kv_numbers * self._itemsize
        return decode_cost_of(weights, kv_bytes, expert_share(config.to_dict()))

    def warm_up(self, _load: Load, rng: np.random.Generator) -> None:
        self.run(WARM_UP, rng)

    @torch.inference_mode()
    def run(self, load: Load, rng: np.random.Generator) -> BatchRun:
        lengths = [load.input_len] * load.batch_size
        prompts = random_prompts(rng, self._model.config.vocab_size, lengths)
        start = time.perf_counter()
        output = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        first = previous = time.perf_counter()
        step_seconds = []
        for _ in range(load.output_len - 1):
            output = self._model(tokens, past_key_values=output.past_key_values, use_cache=True)
            tokens = output.logits[:, -1].argmax(-1, keepdim=True)
            now = time.perf_counter()
            step_seconds.append(now - previous)
            previous = now
        num_tokens = len(step_seconds) * load.batch_size
        return BatchRun(
            [first - start] * load.batch_size, step_seconds, load.input_len + load.output_len / 2, num_tokens
        )
