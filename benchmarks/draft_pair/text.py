"""Text that every machine has: the source of Python's standard library, and a tokenizer made for it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
# Every so many-th file is not trained on.
HELD_OUT_EVERY = 20


def read_text() -> tuple[list[str], list[str]]:
    """The library's modules: those to train on, and those held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")])
    files = [file for file in files if not {"site-packages", "test", "idlelib", "lib2to3"} & set(file.parts)]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    held_out = texts[::HELD_OUT_EVERY]
    return [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY], held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All token ids, i64 [N]."""
    return np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(texts)]).astype(np.int64)
