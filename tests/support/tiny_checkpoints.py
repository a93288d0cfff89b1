"""Checkpoint folders with tiny random models and a tokenizer, made by transformers as the real ones are."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

# Threads cost more than they gain on models this small.
torch.set_num_threads(1)

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG_CLASSES = {
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "gpt_oss": "GptOssConfig",
    "llama": "LlamaConfig",
    "llama4": "Llama4TextConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "mistral": "MistralConfig",
}
# Weights large enough that logits lie well apart: a rounding error then never decides which token is the best.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Of families with latent attention and experts, what differs.
LATENT_SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}


# Of families with linear attention: layers of either kind, and heads of different sizes and numbers.
DELTA_NET_SIZES = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 64,  # a quarter of which is rotated
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
# Sizes of mixtures of experts with layers of every kind.
GPT_OSS_SIZES = {
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 21,
    "swiglu_limit": 1.5,
}
LLAMA_4_SIZES = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.3,
}


def write_checkpoint(folder: Path, family: str = "qwen3", *, tokenizer: bool = True, **config: Any) -> Path:
    """A folder with a random model of the family; `config` holds what differs from the common sizes."""
    torch.manual_seed(0)
    config_class = getattr(transformers, CONFIG_CLASSES[family])
    model = transformers.AutoModelForCausalLM.from_config(config_class(**_SIZES | config)).eval()
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def variant(folder: Path, source: Path, *, files: dict[str, Any] | None = None, **config: Any) -> Path:
    """A folder with the same weights as `source`.

    Args:
      folder: To be made.
      source: A checkpoint folder.
      files: File name -> JSON content, or None for a file to leave out.
      config: Keys of config.json to change; None removes a key.
    """
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in (files or {}):
            (folder / path.name).symlink_to(path)
    for name, content in (files or {}).items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if config:
        changed = json.loads((source / "config.json").read_text()) | config
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of fewer tokens than the model, with a chat template."""
    _tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@functools.cache
def _tokenizer() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [f"the {a} {b} the {c} and says {i}" for i, a in enumerate(_NOUNS) for b in _VERBS for c in _NOUNS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return backend


_NOUNS = ["cat", "river", "model", "teacher", "morning", "garden", "Straße", "language", "question", "answer"]
_VERBS = ["reads", "watches", "follows", "remembers", "forgets", "überholt", "measures", "paints"]
