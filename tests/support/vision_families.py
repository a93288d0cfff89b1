"""Every family that takes images, tiny: its checkpoint, and what transformers' processor makes of images for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL.Image import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.support.vision_checkpoints import (
    MERGE,
    PATCH,
    PIXTRAL,
    TEXT,
    processor_class,
    reference_processor,
    token_id,
    write_model,
    write_tokenizer,
)

Inputs = dict[str, Any]


@dataclass(frozen=True)
class VisionFamily:
    """A family's tiny checkpoint.

    Attributes:
      name: For the test's id.
      config: Its config, given the id of a special token.
      image_processor: transformers' that uses Pillow.
      call: How its processor calls that: image processor and images -> what the model takes, and more.
      processor_files: processor_config.json.
      replace: What its processor puts in the place of an image, given `call`'s result and the image's index.
      special: The tokenizer's special tokens beside those of turns.
      placeholder: What stands for an image.
      views: The pixels of each image, from `call`'s result: [views, 3, height, width], as transformers scales them.
      slow: Whether another family's row has its parts.
    """

    name: str
    config: Callable[[Callable[[str], int]], transformers.PretrainedConfig]
    image_processor: Any
    call: Callable[[Any, list[Image]], Inputs]
    processor_files: Mapping[str, Any]
    replace: Callable[[Inputs, int], str]
    special: Sequence[str]
    placeholder: str
    views: Callable[[Inputs, int], np.ndarray]
    slow: bool = False

    def write(self, folder: Path) -> transformers.PreTrainedModel:
        """Fills a folder; returns the reference, with every parameter random."""
        special = ("<s>", "</s>", "[INST]", "[/INST]", *self.special)
        write_tokenizer(folder, special, self.placeholder)
        (folder / "processor_config.json").write_text(json.dumps(self.processor_files))
        settings = json.dumps(self.image_processor.to_dict(), default=list)
        (folder / "preprocessor_config.json").write_text(settings)
        return write_model(folder, self.config(lambda token: token_id(token, special)))

    def prepared(self, images: Sequence[Image]) -> Inputs:
        """What transformers' image processor makes of the images of a prompt."""
        return self.call(self.image_processor, list(images))

    def model_inputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """What of it the model takes."""
        names = ("pixel_values", "image_sizes", "pixel_attention_mask", "image_grid_thw")
        return {
            name: torch.as_tensor(np.asarray(inputs[name], np.float32 if name == "pixel_values" else None))
            for name in names
            if name in inputs
        }


def _call_pixtral(processor: Any, images: list[Image]) -> Inputs:
    return dict(processor(images, patch_size=PATCH * MERGE, return_tensors="np"))


def _views_of_pixtral(inputs: Inputs, index: int) -> np.ndarray:
    height, width = inputs["image_sizes"][index]
    return inputs["pixel_values"][index][None, :, :height, :width]


def _replace_pixtral(family: str, name: str) -> Callable[[Inputs, int], str]:
    settings = SimpleNamespace(
        **{"patch_size": PATCH, "spatial_merge_size": MERGE, "effective_patch_size": PATCH * MERGE},
        **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    )
    return lambda inputs, index: processor_class(family, name).replace_image_token(settings, inputs, index)


_MISTRAL3 = VisionFamily(
    "Mistral 3",
    lambda token_id: transformers.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=token_id("[IMG]"),
        spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    ),
    reference_processor(),
    _call_pixtral,
    {
        **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        **{"processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": MERGE},
    },
    _replace_pixtral("pixtral", "PixtralProcessor"),
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "[IMG]",
    _views_of_pixtral,
)
_LIGHTON_OCR = dataclasses.replace(
    _MISTRAL3,
    name="LightOnOCR",
    config=lambda token_id: transformers.LightOnOcrConfig(
        text_config=TEXT | {"model_type": "qwen3", "tie_word_embeddings": True},
        vision_config=PIXTRAL,
        image_token_id=token_id("[IMG]"),
        spatial_merge_size=MERGE,
        tie_word_embeddings=True,
    ),
    processor_files={"processor_class": "LightOnOcrProcessor", "patch_size": PATCH, "spatial_merge_size": MERGE},
    replace=_replace_pixtral("lighton_ocr", "LightOnOcrProcessor"),
    slow=True,
)

TILE = 32
_SQUARES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": TILE, "patch_size": PATCH},
}
_IDEFICS3_TOKENS = {
    **{"fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "image_seq_len": 16},
    **{"global_image_tag": "<global-img>"},
}
_IDEFICS3 = VisionFamily(
    "Idefics3",
    lambda token_id: transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=_SQUARES,
        image_token_id=token_id("<image>"),
        scale_factor=2,
    ),
    Idefics3ImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}),
    lambda processor, images: dict(processor([images], return_row_col_info=True, return_tensors="np")),
    {"processor_class": "Idefics3Processor", "image_seq_len": 16},
    lambda inputs, index: Idefics3Processor.replace_image_token(SimpleNamespace(**_IDEFICS3_TOKENS), inputs, index),
    (
        *("<image>", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ),
    "<image>",
    lambda inputs, index: inputs["pixel_values"][0][_views_before(inputs, index) : _views_before(inputs, index + 1)],
)
_SMOLVLM = dataclasses.replace(
    _IDEFICS3,
    name="SmolVLM",
    config=lambda token_id: transformers.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama", "tie_word_embeddings": True},
        vision_config=_SQUARES,
        image_token_id=token_id("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
    ),
    image_processor=SmolVLMImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}),
    processor_files={"processor_class": "SmolVLMProcessor", "image_seq_len": 16},
    slow=True,
)


def _views_before(inputs: Inputs, index: int) -> int:
    rows, columns = inputs["rows"][0], inputs["cols"][0]
    return sum(int(rows[i] * columns[i]) + 1 for i in range(index))


_INTERNVL_TOKENS = {
    **{"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"},
    **{"image_seq_length": 16},
}
_INTERNVL = VisionFamily(
    "InternVL",
    lambda token_id: transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
        vision_config=_SQUARES | {"use_qk_norm": True, "attention_bias": True},
        image_token_id=token_id("<IMG_CONTEXT>"),
        image_seq_length=16,
    ),
    GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, max_patches=5),
    lambda processor, images: dict(processor(images, crop_to_patches=True, return_tensors="np")),
    {"processor_class": "InternVLProcessor", "image_seq_length": 16},
    lambda inputs, index: InternVLProcessor.replace_image_token(SimpleNamespace(**_INTERNVL_TOKENS), inputs, index),
    ("<img>", "</img>", "<IMG_CONTEXT>"),
    "<IMG_CONTEXT>",
    lambda inputs, index: inputs["pixel_values"][sum(inputs["num_patches"][:index]) :][: inputs["num_patches"][index]],
)

FAMILIES = (_MISTRAL3, _LIGHTON_OCR, _IDEFICS3, _SMOLVLM, _INTERNVL)
