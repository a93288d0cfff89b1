"""What a pair drafts by the reference implementations, in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, logging
from transformers.modeling_layers import MtpModel

from draft_pair.layers import Eagle3Head

# Logits [V], the state that the next prediction reads too [1, 1, E], and those that this one read [1, T, E].
Prediction = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# The target's layers whose inputs are read, if not its last states; what predicts; the token of an index of the logits.
Reference = tuple[Sequence[int], Callable[[list[int], torch.Tensor], Prediction], Callable[[int], int]]


def reference_drafter(method: str, folder: Path) -> Callable[[Sequence[int], int], list[int]]:
    """From a document's tokens and a number of drafts to the drafts behind it."""
    logging.set_verbosity_error()  # the layer that predicts is not the model's
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    layer_ids, predict, token_of = (_mtp if method == "mtp" else _eagle3)(model, folder)

    @torch.no_grad()
    def drafts_of(tokens: Sequence[int], num_drafts: int) -> list[int]:
        out = model.model(torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True)
        states = out.last_hidden_state
        if layer_ids:
            states = torch.cat([out.hidden_states[i] for i in layer_ids], dim=-1)
        next_ids, drafts = list(tokens[1:]), []
        for _ in range(num_drafts):
            logits, newest, states = predict(next_ids, states)
            drafts.append(token_of(int(logits.argmax())))
            next_ids.append(drafts[-1])
            states = torch.cat([states, newest], dim=1)
        return drafts

    return drafts_of


def _mtp(model: Any, folder: Path) -> Reference:
    del folder
    # It looks for the layers of published sizes.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]
    mtp = MtpModel.from_pretrained(model).float().eval()

    def predict(next_ids: list[int], states: torch.Tensor) -> Prediction:
        positions = torch.arange(1, len(next_ids) + 1)[None]
        out = mtp.forward_layer(0, states, positions, None, input_ids=torch.tensor([next_ids]))[:, -1:]
        return model.lm_head(out[0, -1]), out, states

    return (), predict, lambda index: index


def _eagle3(model: Any, folder: Path) -> Reference:
    config = json.loads((folder / "eagle3/config.json").read_text())
    layer_ids = config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    tensors = load_file(folder / "eagle3/model.safetensors")
    head = Eagle3Head(LlamaConfig(**config, attn_implementation="sdpa"), tensors["t2d"].nonzero()[:, 0])
    head.load_state_dict(tensors)
    size = config["hidden_size"]

    def predict(next_ids: list[int], states: torch.Tensor) -> Prediction:
        if states.shape[-1] != size:  # the target's, before the first draft
            states = head.fc(states)
        read, out = head.predict(model.model.embed_tokens(torch.tensor([next_ids])), states)
        return head.lm_head(read[0, -1]), out[:, -1:], states

    return layer_ids, predict, lambda index: index + int(head.d2t[index])
