"""A checkpoint for the command line: random weights (`--load-format dummy`), a byte-level tokenizer, a template."""

import json
import sys
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

JAXIS = [sys.executable, "-c", "from jaxis.cli.script import script; script()"]

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('odd role') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout is defined %}HEY{% endif %}{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


def write_checkpoint(folder: Path, *, chat_template: bool = True, tokenizer: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    # Sampling that the options can be seen to override, and no end-of-sequence token: length is what max_tokens says.
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9, "top_k": 7}))
    if tokenizer:
        vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = tokenizers.Tokenizer(models.BPE(vocab, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(SPECIAL_TOKENS)
        backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if chat_template:
            settings["chat_template"] = CHAT_TEMPLATE
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
