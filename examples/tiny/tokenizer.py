"""The embedded model's tokenizer: byte-level BPE with one token a digit, and a ChatML template with tools."""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tiny.corpus import Conversation, draw

VOCAB_SIZE = 3072
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def render(messages: list[dict], tools: list[dict] | None = None, *, add_generation_prompt: bool = False) -> str:
    """The conversation as the model sees it, the same text that transformers renders from the saved template."""
    return _template().render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)


def sample_text(sample: Conversation | str) -> str:
    """A training sample as text, ending with the end-of-text token."""
    text = sample if isinstance(sample, str) else render(sample.messages, sample.tools)
    return text + END_OF_TEXT


def train_tokenizer(seed: int = 0, samples: int = 30_000) -> Tokenizer:
    """Trains the vocabulary on the first `samples` samples of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def plain_texts() -> Iterator[str]:
        rng = random.Random(seed)
        for _ in range(samples):
            text = sample_text(draw(rng))
            for token in (*SPECIAL, *MARKERS):
                text = text.replace(token, "")
            yield text

    tokenizer.train_from_iterator(plain_texts(), trainer)
    # After the learned ids, as in the Qwen family; the tool markers are text that a client reads, so not "special".
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json in the Hugging Face format."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token in SPECIAL,
        }
        for token in (*SPECIAL, *MARKERS)
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
