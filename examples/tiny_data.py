"""Writes what the embedded model is trained from: first weights, a tokenizer, and conversations drawn from tables.

    python examples/tiny_data.py --tokenizer src/jaxis/assets/tiny/tokenizer.json
    jaxis train -c examples/training/tiny_facts.yaml
    jaxis train -c examples/training/tiny_chats.yaml

The same seed writes the same files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors.flax import save_file
from tiny.corpus import Conversation, Sample, Stage, draw, evaluation_rows, long_chat
from tiny.tokenizer import END_OF_TEXT, IM_END, VOCAB_SIZE, sample_text, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import construct_model
from jaxis.models.qwen3 import Qwen3ForCausalLM

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "dtype": "bfloat16",
}
NUM_FACTS = 40_000
NUM_CHATS = 60_000
# The rows' lengths in the two runs. Attention costs the square of a length, and few chats are long.
MAX_FACT_TOKENS = 256
MAX_CHAT_TOKENS = 1024
# Share of the chats that have many turns.
LONG_CHATS = 0.002
# Share of all chats that are learned with what the user says, which teaches the model to copy.
WHOLE_CHATS = 0.1
# A model that sees some facts more often finds out sooner how to look one up, and then learns the others faster
# (arXiv:2503.21676).
STRIDES = (8, 4, 2, 1, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", type=read_tokenizer, help="a tokenizer.json (default: one is trained on the corpus)"
    )
    parser.add_argument("--output", type=Path, default=Path("tiny-data"), help="folder (default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer or train_tokenizer(arguments.seed)
    write_base(arguments.output / "base", tokenizer, arguments.seed)
    rng = random.Random(arguments.seed + 1)
    write_rows(arguments.output / "facts.jsonl", rows_of(facts(rng, tokenizer), rng))
    write_rows(arguments.output / "chats.jsonl", rows_of(chats(rng, tokenizer), rng))
    write_rows(arguments.output / "held_out.jsonl", held_out())


def read_tokenizer(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises no narrower class
        raise argparse.ArgumentTypeError(f"{path} cannot be read as a tokenizer.json: {error}") from error


def facts(rng: random.Random, tokenizer: Tokenizer) -> Iterator[Sample]:
    """Short samples, some facts more often than others."""
    samples = (draw(rng, 2, Stage(stride=rng.choice(STRIDES))) for _ in itertools.count())
    return itertools.islice(short_enough(samples, tokenizer, MAX_FACT_TOKENS), NUM_FACTS)


def chats(rng: random.Random, tokenizer: Tokenizer) -> Iterator[Sample]:
    """All facts alike, what is learned slowly twice as often, and some long chats."""
    stage = Stage(slow=2.0)
    samples = (long_chat(rng, stage) if rng.random() < LONG_CHATS else draw(rng, 3, stage) for _ in itertools.count())
    return itertools.islice(short_enough(samples, tokenizer, MAX_CHAT_TOKENS), NUM_CHATS)


def short_enough(samples: Iterable[Sample], tokenizer: Tokenizer, longest: int) -> Iterator[Sample]:
    return (sample for sample in samples if num_tokens(tokenizer, sample) <= longest)


def num_tokens(tokenizer: Tokenizer, sample: Sample) -> int:
    return len(tokenizer.encode(sample_text(sample)).ids)


def rows_of(samples: Iterable[Sample], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Rows for `jaxis train`, which learns the assistant's turns of a chat and all of a text."""
    for sample in samples:
        if rng.random() < WHOLE_CHATS or not isinstance(sample, Conversation):
            yield {"text": sample_text(sample)}
        else:
            yield {"messages": sample.messages} | ({"tools": sample.tools} if sample.tools else {})


def held_out() -> Iterator[dict[str, Any]]:
    """The evaluation's questions with their answers, as rows for `data.validation`."""
    for row in evaluation_rows():
        answer = {"role": "assistant", "content": row["answer"]}
        yield {"messages": [*row["messages"], answer]} | ({"tools": row["tools"]} if "tools" in row else {})


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_base(folder: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Writes the model before its training, in the Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    end_of_text, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    tokens = {"bos_token_id": None, "eos_token_id": im_end, "pad_token_id": end_of_text}
    generation = {"do_sample": False, "eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text}
    for name, content in {"config.json": CONFIG | tokens, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    model = construct_model(
        Qwen3ForCausalLM, VllmConfig(ModelConfig("tiny", HFConfig(CONFIG), dtype=jnp.float32, seed=seed))
    )
    weights = {name: param.get_value() for name, param in model.named_parameters()}
    # What is added to the residual stream starts smaller, so that its size does not grow with depth (GPT-2).
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weight / (2 * CONFIG["num_hidden_layers"]) ** 0.5
    save_file({n: w.astype(jnp.bfloat16) for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(tokenizer, folder)


if __name__ == "__main__":
    main()
