"""Compares an image's embeddings with the reference's, and the logits that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.bringup.verify.compare import Gates, LogitsComparison, compare_logits, relative_error
from jaxis.bringup.verify.reference import Reference
from jaxis.bringup.verify.step_logits import recorded_logits
from jaxis.errors import ConfigError
from jaxis.offline_requests import WantedRequest
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.vision.processors import read_processor
from jaxis.vision.prompt_images import PromptImages

if TYPE_CHECKING:
    from PIL.Image import Image

    from jaxis.llm import LLM

_SIZE = (96, 64)
_TEXT_LENGTH = 8  # tokens before the image, and as many after it
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class ImagesCheck:
    """A prompt with an image compared with the reference: its embeddings, and the logits of the whole prompt.

    `embeddings_error` is the largest difference, relative to the largest embedding.
    """

    num_embeddings: int
    embeddings_error: float
    comparison: LogitsComparison
    passed: bool


@dataclass(frozen=True)
class ImageAnswer:
    """The reference's embeddings [N, E] and logits [T, V], both float32, for a prompt with an image."""

    prompt: TokenizedPrompt
    embeddings: np.ndarray
    logits: np.ndarray


def ask_about_image(reference: Reference, folder: Path, config: Mapping[str, Any]) -> ImageAnswer | None:
    """Asks the reference about a prompt with an image; returns None if jaxis has no image processor for the checkpoint.

    Raises ConfigError if the reference cannot read the image.
    """
    tokenizer = Tokenizer.from_path(folder) if (folder / "tokenizer.json").exists() else None
    processor = read_processor(folder, tokenizer)
    if processor is None:
        return None
    rng, image = np.random.default_rng(0), _image()
    vocab_size = (config.get("text_config") or config)["vocab_size"]
    # None that stands for something else: special tokens come last in most vocabularies.
    before, after = rng.integers(0, vocab_size // 2, (2, _TEXT_LENGTH)).tolist()
    prompt = PromptImages(processor, {"image": 1}, _MAX_TOKENS).put(
        TokenizedPrompt(None, [*before, processor.placeholder_id, *after]), [image]
    )
    rows = [item.start + row for item in prompt.inputs for row in item.rows]
    embeddings, logits = reference.see(folder, image, list(prompt.token_ids), rows)
    return ImageAnswer(prompt, embeddings, logits)


def _image() -> Image:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    return Image.fromarray(noise).resize(_SIZE, Image.Resampling.BICUBIC)


def check_images(llm: LLM, answer: ImageAnswer, gates: Gates) -> ImagesCheck:
    """Compares the answer of an idle engine with the reference's.

    `gates.module_error` applies to embeddings, the other limits to logits. Raises ConfigError if the engine takes no
    images.
    """
    runner, items = llm.engine.runner, answer.prompt.inputs
    if (feature := runner.feature("inputs")) is None:
        raise ConfigError("the model takes no images: the notes that the engine writes when it starts say why")
    encoder = feature.encoder
    encoder.hold(items)
    try:
        # A tower may add to the text's first layers as well: what follows the embeddings.
        rows = np.concatenate([encoder.rows(item, runner.programs) for item in items])
        embeddings = rows[:, : answer.embeddings.shape[1]]
    finally:
        encoder.let_go(items)
    llm.engine.reset()
    with recorded_logits(llm) as steps:
        llm.requests.run([WantedRequest(answer.prompt, SamplingParams(temperature=0.0, max_tokens=1))])
    error = relative_error(embeddings, answer.embeddings, gates.module_tokens)
    logits = steps[tuple(answer.prompt.token_ids)]
    actual = np.stack([logits[position] for position in range(len(answer.logits))])
    comparison = compare_logits(actual, answer.logits)
    passed = error <= gates.module_error and comparison.passes(gates)
    return ImagesCheck(len(embeddings), error, comparison, passed)
