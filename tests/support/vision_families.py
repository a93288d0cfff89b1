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
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
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
      types: The model's argument that tells an image's tokens from those of text, and such a token; None: it has none.
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
    types: tuple[str, str] | None = None
    slow: bool = False

    @property
    def all_special(self) -> tuple[str, ...]:
        """The tokenizer's special tokens."""
        return ("<s>", "</s>", "[INST]", "[/INST]", *self.special)

    def write(self, folder: Path) -> transformers.PreTrainedModel:
        """Fills a folder; returns the reference, with every parameter random."""
        special = self.all_special
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

    def types_of(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """Which tokens are an image's, as the model takes it."""
        if self.types is None:
            return {}
        name, token = self.types
        return {name: (torch.tensor([tokens]) == token_id(token, self.all_special)).long()}


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

_GEMMA3_LINE = "\n\n<start_of_image>" + 16 * "<image_soft_token>" + "<end_of_image>\n\n"
_GEMMA3 = VisionFamily(
    "Gemma 3",
    lambda token_id: transformers.Gemma3Config(
        text_config=TEXT
        | {"model_type": "gemma3_text", "sliding_window": 11, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=_SQUARES | {"model_type": "siglip_vision_model"},
        image_token_index=token_id("<image_soft_token>"),
        mm_tokens_per_image=16,
    ),
    Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "Gemma3Processor", "image_seq_length": 16},
    lambda inputs, index: Gemma3Processor.replace_image_token(
        SimpleNamespace(full_image_sequence=_GEMMA3_LINE), inputs, index
    ),
    # Lines around an image become tokens together with those that end there.
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n\n\n"),
    "<start_of_image>",
    lambda inputs, index: inputs["pixel_values"][index][None],
    types=("token_type_ids", "<image_soft_token>"),
)

_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}


def _views_of_qwen(inputs: Inputs, index: int) -> np.ndarray:
    grids = inputs["image_grid_thw"]
    first = int(grids[:index].prod(axis=1).sum())
    _, rows, columns = grids[index]
    patches = inputs["pixel_values"][first : first + rows * columns]
    # The frames of an image are the same.
    patches = patches.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, 2, PATCH, PATCH)[:, :, :, :, :, 0]
    return patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * PATCH, columns * PATCH)


_QWEN2_5_VL = VisionFamily(
    "Qwen2.5-VL",
    lambda token_id: transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE, "tie_word_embeddings": False},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": PATCH},
            **{"spatial_merge_size": MERGE, "window_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        },
        image_token_id=token_id("<|image_pad|>"),
        tie_word_embeddings=False,
    ),
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 64}
    ),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "Qwen2_5_VLProcessor"},
    lambda inputs, index: Qwen2_5_VLProcessor.replace_image_token(
        SimpleNamespace(image_token="<|image_pad|>", image_processor=SimpleNamespace(merge_size=MERGE)), inputs, index
    ),
    ("<|image_pad|>",),
    "<|image_pad|>",
    _views_of_qwen,
    types=("mm_token_type_ids", "<|image_pad|>"),
)
_QWEN2_VL = dataclasses.replace(
    _QWEN2_5_VL,
    name="Qwen2-VL",
    config=lambda token_id: transformers.Qwen2VLConfig(
        text_config=TEXT | {"model_type": "qwen2_vl_text", "rope_parameters": _MROPE, "tie_word_embeddings": False},
        vision_config={
            **{"embed_dim": 32, "mlp_ratio": 2, "depth": 2, "num_heads": 2, "patch_size": PATCH},
            **{"spatial_merge_size": MERGE, "hidden_size": 64},
        },
        image_token_id=token_id("<|image_pad|>"),
        tie_word_embeddings=False,
    ),
    processor_files={"processor_class": "Qwen2VLProcessor"},
    slow=True,
)
_QWEN3_VL = dataclasses.replace(
    _QWEN2_5_VL,
    name="Qwen3-VL",
    config=lambda token_id: transformers.Qwen3VLConfig(
        text_config=TEXT
        | {"model_type": "qwen3_vl_text", "rope_parameters": _MROPE | {"mrope_interleaved": True}, "head_dim": 16},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2, "patch_size": PATCH},
            **{"spatial_merge_size": MERGE, "out_hidden_size": 64, "num_position_embeddings": 36},
            **{"deepstack_visual_indexes": [0, 2]},
        },
        image_token_id=token_id("<|image_pad|>"),
        tie_word_embeddings=False,
    ),
    processor_files={"processor_class": "Qwen3VLProcessor"},
)
_QWEN3_VL_MOE = dataclasses.replace(
    _QWEN3_VL,
    name="Qwen3-VL MoE",
    config=lambda token_id: transformers.Qwen3VLMoeConfig(
        text_config=TEXT
        | {"model_type": "qwen3_vl_moe_text", "rope_parameters": _MROPE | {"mrope_interleaved": True}, "head_dim": 16}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2, "patch_size": PATCH},
            **{"spatial_merge_size": MERGE, "out_hidden_size": 64, "num_position_embeddings": 36},
            **{"deepstack_visual_indexes": [0, 2]},
        },
        image_token_id=token_id("<|image_pad|>"),
        tie_word_embeddings=False,
    ),
    slow=True,
)
_QWEN3_5 = dataclasses.replace(
    _QWEN3_VL,
    name="Qwen3.5",
    config=lambda token_id: transformers.Qwen3_5Config(
        text_config=TEXT
        | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
        | {"rope_parameters": _MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": PATCH},
            **{"spatial_merge_size": MERGE, "out_hidden_size": 64, "num_position_embeddings": 36},
        },
        image_token_id=token_id("<|image_pad|>"),
        tie_word_embeddings=False,
    ),
    slow=True,
)

FAMILIES = (
    *(_MISTRAL3, _LIGHTON_OCR, _IDEFICS3, _SMOLVLM, _INTERNVL, _GEMMA3),
    *(_QWEN2_VL, _QWEN2_5_VL, _QWEN3_VL, _QWEN3_VL_MOE, _QWEN3_5),
)
