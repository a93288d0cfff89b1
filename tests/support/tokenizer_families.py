"""Small tokenizers of each family, in folders as those families publish them."""

import json

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

_NOUNS = ["the", "cat", "a", "function", "our", "river", "this", "model", "Straße", "café", "naïve", "Москва", "東京"]
_VERBS = ["reads", "writes", "ends", "returns", "sees", "computes", "überholt", "смотрит", "見る", "العربية"]
CORPUS = [f"{a} {v} {b} {i * 37 % 101}, isn't it?" for i, a in enumerate(_NOUNS) for v in _VERBS for b in _NOUNS[::3]]
CORPUS += ["def f(x):\n    return x + 1  # comment\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n"] * 8

TEXTS = [
    "",
    " ",
    "a",
    "\n\n",
    "the cat reads this model 12345",
    " leading space",
    "trailing space ",
    "double  and   triple    spaces",
    "\ttabs\n\n\nnewlines\r\nwindows",
    "I'll say it's DON'T and we've",
    "Straße, café, naïve, Ω, e\u0301 decomposed, \u1e9b\u0323 compatibility",
    "Москва 東京 العربية עברית हिन्दी ไทย",
    "emoji 😀 👩‍👩‍👧‍👦 🇫🇷 ❤️ done",
    "def f(x):\n    return x ** 2  # ☃\n",
    "zero\x00byte \u200b \ufeff \ufffd",
    "<|im_start|>user\nhello<|im_end|>\n<think>\n\n</think>",
    "<s>[INST] hello [/INST] the cat </s><s>[INST] again [/INST]",
    "<|begin_of_text|>the cat<|eot_id|> after <|end_of_text|>",
    "<0x41> is a byte token's name",
]
# Where transformers 5 rebuilds LlamaTokenizer, it differs from a Llama 2 file of the time before.
LEADING_SPACE_OR_INNER_SPECIAL = {" ", " leading space", "<s>[INST] hello [/INST] the cat </s><s>[INST] again [/INST]"}

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_REGEX = _LLAMA3_REGEX.replace("{1,3}", "")


def _special(*texts):
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def _save(folder, backend, model_type, tokenizer_config):
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    added = {
        str(i): {name: getattr(token, name) for name in ("content", "lstrip", "normalized", "rstrip", "single_word")}
        | {"special": token.special}
        for i, token in backend.get_added_tokens_decoder().items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **tokenizer_config}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def _byte_level(regex, *, normalizer=None, vocab_size=700):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _with_bos(backend, bos, before=()):
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    backend.post_processor = processors.Sequence([*before, template]) if before else template


def llama3(folder):
    backend = _byte_level(_LLAMA3_REGEX)
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(4)]
    backend.add_special_tokens(_special("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", *reserved))
    _with_bos(backend, "<|begin_of_text|>", [processors.ByteLevel(trim_offsets=False)])
    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return _save(folder, backend, "llama", config)


def qwen3(folder):
    backend = _byte_level(_QWEN_REGEX, normalizer=normalizers.NFC())
    backend.add_special_tokens(_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>")])
    config = {
        "add_bos_token": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    return _save(folder, backend, "qwen3", config)


def tekken(folder):
    """Mistral Nemo's shape: byte-level, control tokens in front."""
    backend = _byte_level(_LLAMA3_REGEX.replace("{1,3}", ""))
    backend.add_special_tokens(_special("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"))
    _with_bos(backend, "<s>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save(folder, backend, "mistral", {**named, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"})


def _sentencepiece_like(control):
    """A SentencePiece BPE model with byte fallback, as converted to tokenizer.json."""
    head = ["<unk>", "<s>", "</s>", *control]
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_only = [line for line in CORPUS if line.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=head + byte_tokens, show_progress=False)
    backend.train_from_iterator(ascii_only, trainer)
    values = json.loads(backend.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] in head]
    values["pre_tokenizer"] = None
    backend = tokenizers.Tokenizer.from_str(json.dumps(values))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    _with_bos(backend, "<s>")
    return backend


_LLAMA2_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False},
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False},
    "unk_token": "<unk>",
    "pad_token": None,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "LlamaTokenizer",
}


def llama2(folder):
    backend = _sentencepiece_like([])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _save(folder, backend, "llama", _LLAMA2_CONFIG)


def llama2_v5(folder):
    """The same model, saved by transformers 5."""
    old = llama2(folder.with_name("llama2_to_convert"))
    AutoTokenizer.from_pretrained(old).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def mistral(folder):
    backend = _sentencepiece_like(["[INST]", "[/INST]", "[TOOL_CALLS]"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _save(folder, backend, "mistral", _LLAMA2_CONFIG)


BYTE_LEVEL_FAMILIES = {"llama3": llama3, "qwen3": qwen3, "tekken": tekken}
METASPACE_FAMILIES = {"llama2": llama2, "llama2_v5": llama2_v5, "mistral": mistral}
FAMILIES = BYTE_LEVEL_FAMILIES | METASPACE_FAMILIES
