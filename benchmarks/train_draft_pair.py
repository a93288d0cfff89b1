"""Trains a small model on Python's standard library, with layers that draft for it. Needs the extra `bench` (PyTorch).

    python benchmarks/train_draft_pair.py FOLDER
    python benchmarks/draft_gain.py FOLDER

FOLDER/model has a model in GLM-4.5's shape (mixture of experts) and its layer that predicts later tokens, trained
together as DeepSeek V3's were. FOLDER/eagle3 has an EAGLE-3 head, trained on the finished model's states to say what
the model would. FOLDER/large/model and FOLDER/large/eagle3 compute the same with features and layers that add 0, in
about the size of Qwen3-0.6B. One core takes some minutes; the seed is fixed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from draft_pair.enlarge import Sizes, enlarge_eagle3, enlarge_model
from draft_pair.layers import Eagle3Head, PredictionLayer, chain, mean_loss
from draft_pair.text import VOCAB_SIZE, read_text, tokenize, train_tokenizer

BATCH_SIZE, LENGTH = 12, 128
MTP_DEPTH, MTP_WEIGHT = 2, 0.3
EAGLE_DEPTH = 3
# The states that enter these layers, an early, a middle and a late one of 4.
EAGLE_LAYERS = (1, 2, 3)
DRAFT_VOCAB_SIZE = 768
ROPE_THETA = 10_000.0
_SIZES = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=700, help="of the model and its layer")
    parser.add_argument("--eagle-steps", type=int, default=350, help="of the EAGLE-3 head")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    texts, held_out = read_text()
    tokenizer = train_tokenizer(texts)
    tokens = tokenize(tokenizer, texts)
    print(f"{sum(map(len, texts)) / 1e6:.1f} MB of text, {len(tokens) / 1e6:.1f} million tokens", flush=True)
    model, layer = train_model(tokens, options.steps)
    head = train_eagle3(model, tokens, options.eagle_steps)
    report(model, layer, head, tokenize(tokenizer, held_out))
    large = options.folder / "large"
    save_model(options.folder / "model", model, layer)
    save_eagle3(options.folder / "eagle3", head)
    enlarge_model(options.folder / "model", large / "model", Sizes())
    enlarge_eagle3(options.folder / "eagle3", large / "eagle3", Sizes())
    for folder in (options.folder, large):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")


def model_config() -> Glm4MoeConfig:
    return Glm4MoeConfig(
        **_SIZES,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_shared_experts=1,
        use_qk_norm=True,
        num_mtp_layers=1,
        attn_implementation="sdpa",
    )


def batches(tokens: np.ndarray, num_steps: int) -> Iterator[torch.Tensor]:
    """Windows of the text at random places, i64 [R, T]."""
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        starts = rng.integers(0, len(tokens) - LENGTH, BATCH_SIZE)
        yield torch.from_numpy(np.stack([tokens[start : start + LENGTH] for start in starts]))


def optimizer_of(parameters: list[torch.nn.Parameter], num_steps: int) -> tuple[Optimizer, OneCycleLR]:
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    return optimizer, OneCycleLR(optimizer, 4e-3, num_steps, pct_start=0.1)


def take_step(loss: torch.Tensor, optimizer: Optimizer, schedule: OneCycleLR) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    schedule.step()


def train_model(tokens: np.ndarray, num_steps: int) -> tuple[Glm4MoeForCausalLM, PredictionLayer]:
    """The model and its layer, trained on the text: each to predict what follows, the layer once more by its own."""
    model = Glm4MoeForCausalLM(model_config())
    layer = PredictionLayer(model_config())
    layer.apply(model._init_weights)
    optimizer, schedule = optimizer_of([*model.parameters(), *layer.parameters()], num_steps)
    start = time.perf_counter()
    for step, batch in enumerate(batches(tokens, num_steps)):
        states = model.model(batch, use_cache=False).last_hidden_state
        loss = mean_loss(model.lm_head(states[:, :-1]), batch[:, 1:])
        later = [
            mean_loss(model.lm_head(read[:, :-1]), batch[:, i + 1 :])
            for i, read in enumerate(chain(layer, model.model.embed_tokens(batch), states, MTP_DEPTH), start=1)
        ]
        take_step(loss + MTP_WEIGHT * torch.stack(later).mean(), optimizer, schedule)
        if step % 50 == 49:
            losses = " ".join(f"{each.item():.2f}" for each in (loss, *later))
            print(f"model, step {step + 1}: losses {losses}, {time.perf_counter() - start:.0f} s", flush=True)
    return model.eval(), layer.eval()


def aux_states(model: Glm4MoeForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads [R, T, 3E], and the model's logits [R, T, V]."""
    with torch.no_grad():
        out = model(batch, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[i] for i in EAGLE_LAYERS], dim=-1), out.logits


def train_eagle3(model: Glm4MoeForCausalLM, tokens: np.ndarray, num_steps: int) -> Eagle3Head:
    """A head that predicts the model's own most likely tokens, among those that the text has most of."""
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    draft_ids = torch.from_numpy(np.sort(np.argsort(-counts)[:DRAFT_VOCAB_SIZE]))
    index_of = torch.full((VOCAB_SIZE,), -100)
    index_of[draft_ids] = torch.arange(DRAFT_VOCAB_SIZE)
    head = Eagle3Head(
        LlamaConfig(**_SIZES, num_hidden_layers=1, rope_theta=ROPE_THETA, attn_implementation="sdpa"), draft_ids
    )
    with torch.no_grad():
        head.lm_head.weight.copy_(model.lm_head.weight[draft_ids])
    embed = model.model.embed_tokens.requires_grad_(False)
    optimizer, schedule = optimizer_of(list(head.parameters()), num_steps)
    start = time.perf_counter()
    for step, batch in enumerate(batches(tokens, num_steps)):
        states, logits = aux_states(model, batch)
        labels = index_of[logits.argmax(-1)]
        losses = [
            mean_loss(head.lm_head(read), labels[:, i:])
            for i, read in enumerate(chain(head, embed(batch), head.fc(states), EAGLE_DEPTH), start=1)
        ]
        take_step(torch.stack(losses).mean(), optimizer, schedule)
        if step % 50 == 49:
            shown = " ".join(f"{loss.item():.2f}" for loss in losses)
            print(f"EAGLE-3, step {step + 1}: losses {shown}, {time.perf_counter() - start:.0f} s", flush=True)
    return head.eval()


@torch.no_grad()
def report(model: Glm4MoeForCausalLM, layer: PredictionLayer, head: Eagle3Head, tokens: np.ndarray) -> None:
    """Prints how often each is right about held-out text: the model of the text, the others of the model's choice."""
    [batch] = batches(tokens, 1)
    states, logits = aux_states(model, batch)
    chosen = logits.argmax(-1)
    print(f"held out: model {float((chosen[:, :-1] == batch[:, 1:]).float().mean()):.0%} of the next tokens")
    embeddings = model.model.embed_tokens(batch)
    hidden = model.model(batch, use_cache=False).last_hidden_state
    mtp = [model.lm_head(read).argmax(-1) for read in chain(layer, embeddings, hidden, 4)]
    eagle = [head.lm_head(read).argmax(-1) for read in chain(head, embeddings, head.fc(states), 4)]
    eagle = [index + head.d2t[index] for index in eagle]
    for name, guesses in (("mtp", mtp), ("eagle3", eagle)):
        shares = [float((guess == chosen[:, i:]).float().mean()) for i, guess in enumerate(guesses, start=1)]
        print(f"{name}: {' '.join(f'{share:.0%}' for share in shares)} of the model's choices, 1 to 4 tokens ahead")


def save_model(folder: Path, model: Glm4MoeForCausalLM, layer: PredictionLayer) -> None:
    """Saves the model and its layer as GLM-4.5's files have them: as one more of the model's."""
    config = model_config()
    num_layers, config.num_hidden_layers = config.num_hidden_layers, config.num_hidden_layers + 1
    larger = Glm4MoeForCausalLM(config)
    larger.model.layers[:num_layers].load_state_dict(model.model.layers.state_dict())
    larger.model.layers[num_layers].load_state_dict(layer.state_dict(), strict=False)
    for part in ("model.embed_tokens", "model.norm", "lm_head"):
        larger.get_submodule(part).load_state_dict(model.get_submodule(part).state_dict())
    larger.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
        tensors[f"model.layers.{num_layers}.{name}.weight"] = layer.get_submodule(name).weight.detach()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}, indent=2))


def save_eagle3(folder: Path, head: Eagle3Head) -> None:
    """Saves the head as SpecForge does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(head.state_dict(), folder / "model.safetensors")
    config = {
        **_SIZES,
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
        **{"hidden_act": "silu", "rope_theta": ROPE_THETA, "draft_vocab_size": DRAFT_VOCAB_SIZE},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(EAGLE_LAYERS),
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
