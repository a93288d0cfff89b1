"""Tiny checkpoints with a random vision tower, a tokenizer with an image's tokens, and the files of its processor."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

PATCH, MERGE, LONGEST = 4, 2, 64
# Each text is what it says; an image is its placeholder.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}[/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_SPECIAL = ("<s>", "</s>", "[INST]", "[/INST]", *_PIXTRAL_TOKENS)

TEXT = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}
PIXTRAL = {
    **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": LONGEST, "patch_size": PATCH, "hidden_act": "silu"},
}


def write_mistral3(folder: Path) -> transformers.PreTrainedModel:
    """Fills a folder with a Mistral Small 3.1 of two layers; returns the reference, with every parameter random."""
    config = transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=token_id("[IMG]"),
        spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    )
    write_tokenizer(folder)
    write_processor(folder)
    return write_model(folder, config)


def write_model(folder: Path, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """Writes a model of this config; returns the reference, with every parameter and stored buffer random."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Makes every parameter and stored buffer random, those of norms around 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name or "ln_pre" in name) + 0.2 * torch.randn_like(parameter))
        stored = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point():
                # Limits of what enters and leaves a product are such that some is cut off.
                limit = -1.0 if name.endswith("_min") else 1.0
                buffer.copy_(limit * (1 + 0.2 * torch.rand_like(buffer)))


_PIXTRAL_PROCESSOR = {
    **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    **{"processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": MERGE},
}


def write_processor(folder: Path, processor: dict[str, Any] = _PIXTRAL_PROCESSOR) -> None:
    """The two files of a processor."""
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(reference_processor().to_dict(), default=list))


def reference_processor() -> PixtralImageProcessorPil:
    """What resizes images in transformers, as a Mistral 3 processor calls it."""
    return PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size={"height": 8, "width": 8})


def processor_class(family: str, name: str) -> Any:
    """A processor of transformers, whose module wants torchvision for a function that is elsewhere, too."""
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    return getattr(importlib.import_module(f"transformers.models.{family}.processing_{family}"), name)


def image_processing(family: str) -> Any:
    """The module of a family's image processor in transformers, which wants torchvision for what is not called here."""
    return _without_torchvision(f"transformers.models.{family}.image_processing_{family}")


def video_processing(family: str) -> Any:
    """The same of its video processor."""
    return _without_torchvision(f"transformers.models.{family}.video_processing_{family}")


def _without_torchvision(module: str) -> Any:
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names if name not in sys.modules}):
        return importlib.import_module(module)


def write_tokenizer(folder: Path, special: Sequence[str] = _SPECIAL, placeholder: str = "[IMG]") -> None:
    """A tokenizer whose tokens are bytes and special tokens, and whose chat template has placeholders."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE.replace("[IMG]", placeholder)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_image(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """An image of smooth noise."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def _vocabulary() -> dict[str, int]:
    return {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def token_id(token: str, special: Sequence[str] = _SPECIAL) -> int:
    """The id of a special token."""
    return len(_vocabulary()) + special.index(token)
