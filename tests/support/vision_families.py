"""Every family that takes images, tiny: its checkpoint, and what transformers' processor makes of images for it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from PIL.Image import Image
from safetensors.numpy import load_file, save_file
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, SizeDict
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
from transformers.models.muse_glimmer.processing_muse_glimmer import MuseGlimmerProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.support.kimi_k3_vision import SETTINGS as KIMI_K3_SETTINGS
from tests.support.kimi_k3_vision import KimiK3VisionReference, upright_pixels
from tests.support.places import TESTS
from tests.support.vision_checkpoints import (
    LONGEST,
    MERGE,
    PATCH,
    TEXT,
    image_processing,
    processor_class,
    randomize,
    reference_processor,
    token_id,
    write_model,
    write_tokenizer,
)

Inputs = dict[str, Any]
_ROWS: Mapping[str, Any] = yaml.safe_load((TESTS / "data" / "vision_families.yaml").read_text())["families"]


@dataclass(frozen=True)
class VisionFamily:
    """A family's tiny checkpoint.

    Attributes:
      name: For the test's id.
      image_processor: transformers' that uses Pillow.
      call: How its processor calls that: image processor and images -> what the model takes, and more.
      processor_files: processor_config.json.
      replace: What its processor puts in the place of an image, given `call`'s result and the image's index.
      special: The tokenizer's special tokens beside those of turns.
      placeholder: What stands for an image.
      views: The pixels of each image, from `call`'s result: [3, height, width] each, as transformers scales them.
      types: The model's argument that tells an image's tokens from those of text, and such a token; None: it has none.
      features: The reference and `model_inputs` -> an image's embeddings, for each image, and so for each layer that
        gets some.
      logits: The reference, tokens [1, T], `model_inputs` and `types_of` -> logits [1, T, V].
      seen_together: Tokens of an image that one step computes, if it has to.
      logprob_error: How far a log-probability may be off, beyond 1e-4 of itself.
      cache: Memory for the cache in which four requests do not fit.
      slow: Whether another family's row has its parts.
      num_images: Of the prompt that the reference answers.
      publish: Makes of a folder that transformers wrote one as the maker publishes it, where they differ.
      change: Changes the config, given a function from a special token to its id.
      has_image_processor: Whether transformers has its image processor where there is Pillow only.
    """

    name: str
    image_processor: Any
    call: Callable[[Any, list[Image]], Inputs]
    processor_files: Mapping[str, Any]
    replace: Callable[[Inputs, int], str]
    special: Sequence[str]
    placeholder: str
    views: Callable[[Inputs, int], Sequence[np.ndarray]]
    types: tuple[str, str] | None = None
    features: Callable[[Any, Inputs], list[Any]] = lambda model, inputs: _features(model, inputs)
    logits: Callable[[Any, torch.Tensor, Inputs, Inputs], torch.Tensor] = lambda *of: _logits(*of)
    seen_together: int = 0
    logprob_error: float = 0.0
    cache: str = "168KiB"
    slow: bool = False
    num_images: int = 3
    publish: Callable[[Path], None] = lambda _: None
    change: Callable[[transformers.PretrainedConfig, Callable[[str], int]], None] = lambda *_: None
    has_image_processor: bool = True

    @property
    def all_special(self) -> tuple[str, ...]:
        """The tokenizer's special tokens."""
        return ("<s>", "</s>", "[INST]", "[/INST]", *self.special)

    def config(self, token_id: Callable[[str], int]) -> transformers.PretrainedConfig:
        """Returns transformers' config, given a function from a special token to its id."""
        row = copy.deepcopy(_ROWS[self.name])
        text = {key: value for key, value in (TEXT | row["text"]).items() if key not in row.get("without", ())}
        ids = {key: token_id(token) for key, token in row["tokens"].items()}
        make = getattr(transformers, row["class"])
        config = make(text_config=text, vision_config=row["vision"], **ids, **row.get("settings", {}))
        self.change(config, token_id)
        return config

    def write(self, folder: Path) -> transformers.PreTrainedModel:
        """Fills a folder; returns the reference, with every parameter random."""
        special = self.all_special
        write_tokenizer(folder, special, self.placeholder)
        (folder / "processor_config.json").write_text(json.dumps(self.processor_files))
        settings = json.dumps(self.image_processor.to_dict(), default=list)
        (folder / "preprocessor_config.json").write_text(settings)
        model = write_model(folder, self.config(lambda token: token_id(token, special)))
        self.publish(folder)
        return model

    def prepared(self, images: Sequence[Image]) -> Inputs:
        """What transformers' image processor makes of the images of a prompt."""
        return self.call(self.image_processor, list(images))

    def model_inputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """What of it the model takes."""
        names = ("pixel_values", "image_sizes", "pixel_attention_mask", "image_grid_thw", "image_position_ids")
        names += ("spatial_shapes", "batch_num_images", "target_sizes")
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


def _features(model: Any, inputs: Inputs) -> list[Any]:
    features = model.model.get_image_features(**inputs)
    return [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]


def _logits(model: Any, tokens: torch.Tensor, inputs: Inputs, types: Inputs) -> torch.Tensor:
    return model(tokens, **inputs, **types).logits


def _call_pixtral(processor: Any, images: list[Image]) -> Inputs:
    return dict(processor(images, patch_size=PATCH * MERGE, return_tensors="np"))


def _replaced(processor: Any, **settings: Any) -> Callable[[Inputs, int], str]:
    """Makes a family's `replace` of transformers' processor, which reads these settings of itself."""
    return functools.partial(processor.replace_image_token, SimpleNamespace(**settings))


def _views_of_pixtral(inputs: Inputs, index: int) -> np.ndarray:
    height, width = inputs["image_sizes"][index]
    return inputs["pixel_values"][index][None, :, :height, :width]


def _replace_pixtral(family: str, name: str, merge_size: int = MERGE) -> Callable[[Inputs, int], str]:
    settings = SimpleNamespace(
        **{"patch_size": PATCH, "spatial_merge_size": merge_size, "effective_patch_size": PATCH * merge_size},
        **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    )
    return lambda inputs, index: processor_class(family, name).replace_image_token(settings, inputs, index)


_MISTRAL3 = VisionFamily(
    "Mistral 3",
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
    processor_files={"processor_class": "LightOnOcrProcessor", "patch_size": PATCH, "spatial_merge_size": MERGE},
    replace=_replace_pixtral("lighton_ocr", "LightOnOcrProcessor"),
    slow=True,
)
_MISTRAL_LARGE_4 = dataclasses.replace(_MISTRAL3, name="Mistral Large 4")

TILE = 32
_IDEFICS3_TOKENS = {
    **{"fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "image_seq_len": 16},
    **{"global_image_tag": "<global-img>"},
}
_IDEFICS3 = VisionFamily(
    "Idefics3",
    Idefics3ImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}),
    lambda processor, images: dict(processor([images], return_row_col_info=True, return_tensors="np")),
    {"processor_class": "Idefics3Processor", "image_seq_len": 16},
    _replaced(Idefics3Processor, **_IDEFICS3_TOKENS),
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
    GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, max_patches=5),
    lambda processor, images: dict(processor(images, crop_to_patches=True, return_tensors="np")),
    {"processor_class": "InternVLProcessor", "image_seq_length": 16},
    _replaced(InternVLProcessor, **_INTERNVL_TOKENS),
    ("<img>", "</img>", "<IMG_CONTEXT>"),
    "<IMG_CONTEXT>",
    lambda inputs, index: inputs["pixel_values"][sum(inputs["num_patches"][:index]) :][: inputs["num_patches"][index]],
    slow=True,
)
_INTERNVL_3_5 = dataclasses.replace(_INTERNVL, name="InternVL 3.5")

_GEMMA3_LINE = "\n\n<start_of_image>" + 16 * "<image_soft_token>" + "<end_of_image>\n\n"
_GEMMA3 = VisionFamily(
    "Gemma 3",
    Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "Gemma3Processor", "image_seq_length": 16},
    _replaced(Gemma3Processor, full_image_sequence=_GEMMA3_LINE),
    # Lines around an image become tokens together with those that end there.
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n\n\n"),
    "<start_of_image>",
    lambda inputs, index: inputs["pixel_values"][index][None],
    types=("token_type_ids", "<image_soft_token>"),
    seen_together=16,
)


def _views_of_qwen(inputs: Inputs, index: int) -> np.ndarray:
    grids = inputs["image_grid_thw"]
    first = int(grids[:index].prod(axis=1).sum())
    _, rows, columns = grids[index]
    patches = inputs["pixel_values"][first : first + rows * columns]
    # The frames of an image are the same.
    patches = patches.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, 2, PATCH, PATCH)[:, :, :, :, :, 0]
    return patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * PATCH, columns * PATCH)


def _views_in_rows(inputs: Inputs, index: int) -> np.ndarray:
    """Of patches [3, PATCH, PATCH] that lie row by row, not merged ones after each other."""
    grids = inputs["image_grid_thw"]
    first = int(grids[:index].prod(axis=1).sum())
    _, rows, columns = grids[index]
    patches = inputs["pixel_values"][first : first + rows * columns].reshape(rows, columns, 3, PATCH, PATCH)
    return patches.transpose(2, 0, 3, 1, 4).reshape(1, 3, rows * PATCH, columns * PATCH)


_QWEN2_5_VL = VisionFamily(
    "Qwen2.5-VL",
    Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 64}
    ),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "Qwen2_5_VLProcessor"},
    _replaced(Qwen2_5_VLProcessor, image_token="<|image_pad|>", image_processor=SimpleNamespace(merge_size=MERGE)),
    ("<|image_pad|>",),
    "<|image_pad|>",
    _views_of_qwen,
    types=("mm_token_type_ids", "<|image_pad|>"),
)
_QWEN2_VL = dataclasses.replace(
    _QWEN2_5_VL, name="Qwen2-VL", processor_files={"processor_class": "Qwen2VLProcessor"}, slow=True
)


def _publish_paddleocr(folder: Path) -> None:
    """The text's keys have no object of their own, and a few are the makers'."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config = text | config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    config |= {"rope_is_neox_style": True, "use_3d_rope": True, "weight_share_add_bias": True, "compression_ratio": 1.0}
    vision = config["vision_config"]
    vision |= {"model_type": "paddleocr_vl", "temporal_patch_size": 2, "tokens_per_second": 2}
    del vision["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))


_PADDLEOCR_VL = dataclasses.replace(
    _QWEN2_5_VL,
    name="PaddleOCR-VL",
    image_processor=PaddleOCRVLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 64}
    ),
    processor_files={"processor_class": "PaddleOCRVLProcessor"},
    replace=_replaced(
        PaddleOCRVLProcessor, image_token="<|IMAGE_PLACEHOLDER|>", image_processor=SimpleNamespace(merge_size=MERGE)
    ),
    special=("<|IMAGE_PLACEHOLDER|>",),
    placeholder="<|IMAGE_PLACEHOLDER|>",
    views=_views_in_rows,
    types=("mm_token_type_ids", "<|IMAGE_PLACEHOLDER|>"),
    publish=_publish_paddleocr,
    slow=True,
)
_EXAONE_4_5 = dataclasses.replace(
    _QWEN2_5_VL, name="EXAONE 4.5", processor_files={"processor_class": "Exaone4_5_Processor"}, types=None, slow=True
)
_LFM3_VL = dataclasses.replace(
    _QWEN2_5_VL, name="LFM3-VL", processor_files={"processor_class": "Lfm3VlProcessor"}, types=None, slow=True
)
_QWEN3_VL = dataclasses.replace(_QWEN2_5_VL, name="Qwen3-VL", processor_files={"processor_class": "Qwen3VLProcessor"})
_QWEN3_VL_MOE = dataclasses.replace(_QWEN3_VL, name="Qwen3-VL MoE", slow=True)
_QWEN3_5 = dataclasses.replace(_QWEN3_VL, name="Qwen3.5", slow=True)

_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5,
    name="Qwen3.5 MoE",
    logprob_error=1e-4,  # 7.5e-5 seen
)
_QWEN3_8_FLASH_NEXT = dataclasses.replace(_QWEN3_5, name="Qwen3.8-Flash-Next", slow=False)


_MINIMAX_M3_MERGE = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}


def _publish_minimax_m3(folder: Path) -> None:
    """Gives the settings of images the form of the published files, in which most of the processor's are not read."""
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    theta = vision.pop("rope_parameters")["rope_theta"]
    for key in ("spatial_merge_size", "temporal_patch_size"):
        del vision[key]
    vision |= {"model_type": "clip_vision_model", "position_embedding_type": "rope", "rope_mode": "3d"}
    vision |= {"projection_dim": 64, "vision_segment_max_frames": 4, "rope_theta": theta}
    vision["img_token_compression_config"] = config["img_token_compression_config"] = _MINIMAX_M3_MERGE
    config |= {"multimodal_projector_bias": True, "projector_hidden_act": "gelu", "process_image_mode": "dynamic_res"}
    config |= {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, "num_reward_heads": 0}
    config |= {"image_grid_pinpoints": "[(336, 336), (336, 672)]", "image_seq_length": 576}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").unlink()
    merge = _MINIMAX_M3_MERGE | {"image_token_compression_threshold": 1.1, "max_image_resolution": 1008}
    settings = {
        **{"processor_class": "MiniMaxVLProcessor", "process_image_mode": "dynamic_res", "size": [672, 672]},
        **{"patch_size": PATCH, "img_token_compression_config": merge, "add_start_end_special_tokens": True},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


_MINIMAX_M3 = dataclasses.replace(
    _QWEN2_5_VL,
    name="MiniMax M3",
    image_processor=Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 3136, "longest_edge": 451584}
    ),
    processor_files={"processor_class": "MiniMaxM3VLProcessor"},
    replace=_replaced(
        MiniMaxM3VLProcessor,
        **{"IMAGE_TOKEN": "]<]image[>[", "VISION_START_TOKEN": "]<]start of image[>["},
        **{"VISION_END_TOKEN": "]<]end of image[>[", "image_processor": SimpleNamespace(merge_size=MERGE)},
    ),
    special=("]<]image[>[", "]<]start of image[>[", "]<]end of image[>["),
    placeholder="]<]image[>[",
    types=None,
    publish=_publish_minimax_m3,
    has_image_processor=False,
)


def _inkling(name: str, *, has_more: bool, scale: tuple[Any, Any]) -> VisionFamily:
    """Inkling's processors need torchvision: this cuts the padded images as they do, a patch after the other.

    Args:
      name: Name of the family.
      has_more: True if rows of whole patches have one more, and patches two equal frames.
      scale: Mean and deviation of pixels.
    """
    side = PATCH * MERGE
    mean, std = (np.asarray(each, np.float32)[:, None, None] for each in scale)

    def call(_: Any, images: list[Image]) -> Inputs:
        patches, grids = [], []
        for image in images:
            pixels = np.asarray(image, np.float32).transpose(2, 0, 1)
            rows = -(-image.height // side)
            columns = image.width // side + 1 if has_more else -(-image.width // side)
            grids.append([1, rows, columns])
            for row, column in itertools.product(range(rows), range(columns)):
                patch = pixels[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
                missing = [(0, 0), *((0, side - size) for size in patch.shape[1:])]
                padded = np.pad(patch, missing, constant_values=-1.0)
                patches.append(((padded / 255 - mean) / std).transpose(1, 2, 0))
        pixel_values = np.stack(patches)
        if has_more:
            return {"pixel_values": np.stack([pixel_values] * 2, axis=1), "grids": grids}
        return {"pixel_values": pixel_values, "image_grid_thw": np.asarray(grids), "grids": grids}

    def views(inputs: Inputs, index: int) -> Sequence[np.ndarray]:
        before = sum(int(np.prod(grid)) for grid in inputs["grids"][:index])
        _, rows, columns = inputs["grids"][index]
        pixels = inputs["pixel_values"][before : before + rows * columns]
        pixels = (pixels[:, 0] if has_more else pixels).reshape(rows, columns, side, side, 3)
        return [pixels.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)]

    settings = {
        "image_processor_type": f"{name.replace(' ', '')}ImageProcessor",
        "size": {"height": side, "width": side},
    }
    settings |= {"image_mean": list(scale[0]), "image_std": list(scale[1])}
    return VisionFamily(
        name,
        SimpleNamespace(to_dict=lambda: settings),
        call,
        {},
        lambda inputs, index: "<|unused_200054|>" * int(np.prod(inputs["grids"][index])),
        ("<|unused_200054|>",),
        "<|unused_200054|>",
        views,
        has_image_processor=False,
    )


_INKLING = _inkling("Inkling", has_more=True, scale=(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
_INKLING_2 = _inkling("Inkling 2", has_more=False, scale=([0.5] * 3, [0.5] * 3))


def _views_of_gemma4(inputs: Inputs, index: int) -> np.ndarray:
    places = inputs["image_position_ids"][index]
    columns, rows = places.max(axis=0) + 1
    patches = inputs["pixel_values"][index][: rows * columns].reshape(rows, columns, PATCH, PATCH, 3)
    pixels = patches.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * PATCH, columns * PATCH)
    return 2 * (pixels - 0.5)  # the reference does this in the model


_GEMMA4_TOKENS = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
_GEMMA4 = VisionFamily(
    "Gemma 4",
    Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=3, max_soft_tokens=70),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "Gemma4Processor"},
    _replaced(Gemma4Processor, **_GEMMA4_TOKENS),
    tuple(_GEMMA4_TOKENS.values()),
    "<|image|>",
    _views_of_gemma4,
    types=("mm_token_type_ids", "<|image|>"),
    seen_together=70,
    slow=True,
)
_GEMMA4_CAUSAL = dataclasses.replace(_GEMMA4, name="Gemma 4 without what sees later tokens", seen_together=0, slow=True)


def _call_gemma4_unified(processor: Any, images: list[Image]) -> Inputs:
    """The reference's processor needs torchvision: its patches are those of Gemma 4's, joined."""
    inputs = dict(processor(images, return_tensors="np"))
    joined, places = np.zeros((len(images), 70, 3 * 12 * 12), np.float32), np.full((len(images), 70, 2), -1)
    for i in range(len(images)):
        pixels = (_views_of_gemma4(inputs, i)[0] / 2 + 0.5).transpose(1, 2, 0)
        rows, columns = pixels.shape[0] // 12, pixels.shape[1] // 12
        own = pixels.reshape(rows, 12, columns, 12, 3).swapaxes(1, 2).reshape(rows * columns, -1)
        joined[i, : len(own)] = own
        grid = np.meshgrid(np.arange(columns), np.arange(rows), indexing="xy")
        places[i, : len(own)] = np.stack(grid, axis=-1).reshape(-1, 2)
    small = {"small": inputs, "num_soft_tokens_per_image": inputs["num_soft_tokens_per_image"]}
    return {"pixel_values": joined, "image_position_ids": places, **small}


def _gemma4_unified_logits(model: Any, tokens: torch.Tensor, inputs: Inputs, types: Inputs) -> torch.Tensor:
    """With the masks of `generate`, whose windows are otherwise than where the reference is called."""
    nothing = dict.fromkeys(("attention_mask", "cache", "position_ids"))
    masks = model.create_masks_for_generate(model.config, torch.zeros(*tokens.shape, 1), **nothing, **types)
    return model(tokens, **inputs, **types, attention_mask=masks).logits


_GEMMA4_UNIFIED = dataclasses.replace(
    _GEMMA4,
    name="Gemma 4 12B",
    call=_call_gemma4_unified,
    processor_files={"processor_class": "Gemma4UnifiedProcessor"},
    views=lambda inputs, index: _views_of_gemma4(inputs["small"], index) / 2 + 0.5,
    logits=_gemma4_unified_logits,
    slow=True,
    has_image_processor=False,
)

_GLM_4_1V = dataclasses.replace(
    _QWEN2_5_VL,
    name="GLM-4.1V",
    image_processor=Glm4vImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 8 * 8 * 8, "longest_edge": 8 * 8 * 128}
    ),
    processor_files={"processor_class": "Glm4vProcessor"},
    replace=_replaced(Glm4vProcessor, image_token="<|image|>", image_processor=SimpleNamespace(merge_size=MERGE)),
    special=("<|image|>",),
    placeholder="<|image|>",
    types=("mm_token_type_ids", "<|image|>"),
    slow=True,
)
_GLM_4_5V = dataclasses.replace(_GLM_4_1V, name="GLM-4.5V", slow=True)
_GLM_OCR = dataclasses.replace(
    _GLM_4_1V,
    name="GLM-OCR",
    image_processor=Glm46VImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 8 * 8 * 8, "longest_edge": 8 * 8 * 128}
    ),
    processor_files={"processor_class": "Glm46VProcessor"},
    slow=True,
)
_GLM_5_3_FLASH = dataclasses.replace(
    _GLM_4_1V,
    name="GLM-5.3-Flash",
    image_processor=Glm5NextImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, min_image_tokens=4, max_image_tokens=64
    ),
    processor_files={"processor_class": "Glm5NextProcessor"},
    types=None,
    slow=False,
)

_DEEPSEEK_VL = VisionFamily(
    "DeepSeek-VL",
    DeepseekVLImageProcessorPil(size={"height": TILE, "width": TILE}, min_size=3),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "DeepseekVLProcessor", "num_image_tokens": 64},
    _replaced(DeepseekVLProcessor, image_token="<image_placeholder>", num_image_tokens=64),
    ("<image_placeholder>",),
    "<image_placeholder>",
    lambda inputs, index: inputs["pixel_values"][index][None],
)
_LLAVA_TOKENS = {
    **{"image_token": "<image>", "patch_size": PATCH, "num_additional_image_tokens": 1},
    **{"vision_feature_select_strategy": "default"},
}
_LLAVA = VisionFamily(
    "LLaVA 1.5",
    CLIPImageProcessorPil(size={"shortest_edge": TILE}, crop_size={"height": TILE, "width": TILE}),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "LlavaProcessor", **_LLAVA_TOKENS},
    _replaced(LlavaProcessor, **_LLAVA_TOKENS),
    ("<image>",),
    "<image>",
    lambda inputs, index: inputs["pixel_values"][index][None],
    slow=True,
)
_LLAVA_SIGLIP = dataclasses.replace(
    _LLAVA,
    name="LLaVA with SigLIP",
    image_processor=SiglipImageProcessorPil(size={"height": TILE, "width": TILE}),
    processor_files={"processor_class": "LlavaProcessor", "patch_size": PATCH},
    replace=lambda inputs, index: "<image>" * (TILE // PATCH) ** 2,
    slow=True,
)
_VIP_LLAVA = dataclasses.replace(_LLAVA, name="ViP-LLaVA", slow=True)

_AYA_TOKENS = {
    **{"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"},
    **{"img_patch_token": "<|IMG_PATCH|>", "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"},
    **{"img_size": TILE, "patch_size": 2 * PATCH},
}
_AYA = dataclasses.replace(
    _INTERNVL,
    name="Aya Vision",
    processor_files={
        **{"processor_class": "AyaVisionProcessor", "patch_size": PATCH, "img_size": TILE, "downsample_factor": 2}
    },
    replace=_replaced(AyaVisionProcessor, **_AYA_TOKENS),
    special=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"),
    placeholder="<image>",
    slow=True,
)
_COMMAND_A_TOKENS = {
    **{"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "image_token": "<|IMG_PATCH|>"},
    **{"img_line_break_token": "<|IMG_LINE_BREAK|>", "patch_size": PATCH},
}


def _call_command_a(processor: Any, images: list[Image]) -> Inputs:
    """As `_call_llama4`."""
    module, tiles, counts = image_processing("cohere2_vision"), [], []
    for image in images:
        size = (image.height, image.width)
        columns, rows = module.get_optimal_tiled_canvas(size, (TILE, TILE), 1, 5)
        canvas = np.asarray(image.resize((columns * TILE, rows * TILE), resample=3))
        views = [tile for row in np.split(canvas, rows) for tile in np.split(row, columns, axis=1)]
        views += [np.asarray(image.resize((TILE, TILE), resample=3))] * (len(views) > 1)
        counts.append(len(views))
        tiles += views
    scaled = (np.stack(tiles) / 255 - processor.image_mean) / processor.image_std
    return {"pixel_values": scaled.transpose(0, 3, 1, 2).astype(np.float32), "num_patches": counts}


_COMMAND_A = dataclasses.replace(
    _AYA,
    name="Command A Vision",
    call=_call_command_a,
    processor_files={
        "processor_class": "Cohere2VisionProcessor",
        "image_processor": {
            **{"size": {"height": TILE, "width": TILE}, "max_patches": 5, "patch_size": PATCH},
            **{"image_mean": GotOcr2ImageProcessorPil.image_mean, "image_std": GotOcr2ImageProcessorPil.image_std},
        },
    },
    replace=_replaced(Cohere2VisionProcessor, **_COMMAND_A_TOKENS),
    special=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
    placeholder="<|IMG_PATCH|>",
    has_image_processor=False,
)
_CANVASES = _ROWS["LLaVA-NeXT"]["settings"]["image_grid_pinpoints"]
_LLAVA_NEXT_TOKENS = _LLAVA_TOKENS | {"patch_size": 8}


def _views_of_llava_next(inputs: Inputs, index: int) -> np.ndarray:
    count = image_size_to_num_patches(list(inputs["image_sizes"][index]), _CANVASES, TILE)
    return inputs["pixel_values"][index][:count]


def _replace_llava_next(tokens: Mapping[str, Any]) -> Callable[[Inputs, int], str]:
    processor = object.__new__(LlavaNextProcessor)
    vars(processor).update(tokens, image_processor=SimpleNamespace(image_grid_pinpoints=_CANVASES))
    return processor.replace_image_token


_LLAVA_NEXT = dataclasses.replace(
    _LLAVA,
    name="LLaVA-NeXT",
    image_processor=LlavaNextImageProcessorPil(
        size={"shortest_edge": TILE}, crop_size={"height": TILE, "width": TILE}, image_grid_pinpoints=_CANVASES
    ),
    processor_files={"processor_class": "LlavaNextProcessor", **_LLAVA_NEXT_TOKENS},
    replace=_replace_llava_next(_LLAVA_NEXT_TOKENS),
    views=_views_of_llava_next,
)
_LLAVA_NEXT_VIDEO = dataclasses.replace(
    _LLAVA_NEXT,
    name="LLaVA-NeXT-Video",
    processor_files={"processor_class": "LlavaNextVideoProcessor", **_LLAVA_NEXT_TOKENS},
    special=("<image>", "<video>"),
    slow=True,
)
_GRANITE_TOKENS = _LLAVA_NEXT_TOKENS | {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"}
_GRANITE_VISION = dataclasses.replace(
    _LLAVA_NEXT,
    name="Granite Vision",
    image_processor=LlavaNextImageProcessorPil(
        size={"height": TILE, "width": TILE}, crop_size={"height": TILE, "width": TILE}, image_grid_pinpoints=_CANVASES
    ),
    processor_files={"processor_class": "LlavaNextProcessor", **_GRANITE_TOKENS},
    replace=_replace_llava_next(_GRANITE_TOKENS),
    slow=True,
)
# Not a whole number of patches, as in the published models.
_ONEVISION_TILE = TILE + 2
_ONEVISION_CANVASES = _ROWS["LLaVA-OneVision"]["settings"]["image_grid_pinpoints"]
_ONEVISION_TOKENS = {
    **{"num_image_tokens": (TILE // PATCH) ** 2, "vision_feature_select_strategy": "full", "image_token": "<image>"},
    **{"vision_aspect_ratio": "anyres_max_1"},
}


def _views_of_onevision(inputs: Inputs, index: int) -> np.ndarray:
    size, count = list(inputs["image_sizes"][index]), 1
    if inputs["batch_num_images"][0] == 1:
        count = image_size_to_num_patches(size, _ONEVISION_CANVASES, _ONEVISION_TILE)
    return inputs["pixel_values"][index][:count, :, :TILE, :TILE]


def _replace_onevision(inputs: Inputs, index: int) -> str:
    processor = object.__new__(LlavaOnevisionProcessor)
    vars(processor).update(_ONEVISION_TOKENS, image_processor=SimpleNamespace(image_grid_pinpoints=_ONEVISION_CANVASES))
    return processor.replace_image_token(inputs, index)


_LLAVA_ONEVISION = dataclasses.replace(
    _LLAVA,
    name="LLaVA-OneVision",
    image_processor=LlavaOnevisionImageProcessorPil(
        size={"height": _ONEVISION_TILE, "width": _ONEVISION_TILE}, image_grid_pinpoints=_ONEVISION_CANVASES
    ),
    call=lambda processor, images: dict(processor([images], return_tensors="np")),
    processor_files={"processor_class": "LlavaOnevisionProcessor", **_ONEVISION_TOKENS},
    replace=_replace_onevision,
    views=_views_of_onevision,
)
_LLAVA_ONEVISION_ALONE = dataclasses.replace(_LLAVA_ONEVISION, name="LLaVA-OneVision, one image", num_images=1)
_PIXTRAL_12B = dataclasses.replace(
    _MISTRAL3,
    name="Pixtral 12B",
    image_processor=PixtralImageProcessorPil(
        size={"longest_edge": LONGEST}, patch_size={"height": PATCH, "width": PATCH}
    ),
    call=lambda processor, images: dict(processor(images, patch_size=PATCH, return_tensors="np")),
    processor_files={"processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": 1},
    replace=_replace_pixtral("pixtral", "PixtralProcessor", merge_size=1),
    slow=True,
)

_LLAMA4_TOKENS = {"patch_size": PATCH, "downsample_ratio": 4}


def _call_llama4(_: Any, images: list[Image]) -> Inputs:
    """The reference's processor needs torchvision: here Pillow resizes, and its functions choose the sizes."""
    module, grids = image_processing("llama4"), []
    tiles: list[np.ndarray] = []
    for image in images:
        size = (image.height, image.width)
        possible = module.find_supported_resolutions(max_num_chunks=4, patch_size=SizeDict(height=TILE, width=TILE))
        canvas = module.get_best_fit(size, torch.tensor(possible)).tolist()
        most = tuple(min(max(each, TILE), limit) for each, limit in zip(size, canvas, strict=True))
        height, width = (max(each, 1) for each in module.get_max_res_without_distortion(size, most))
        pixels = np.zeros((*canvas, 3), np.uint8)
        pixels[:height, :width] = np.asarray(image.resize((width, height), resample=2))
        rows, columns = canvas[0] // TILE, canvas[1] // TILE
        grids.append([rows, columns])
        tiles += [row_tile for row in np.split(pixels, rows) for row_tile in np.split(row, columns, axis=1)]
        if rows * columns > 1:
            tiles.append(np.asarray(image.resize((TILE, TILE), resample=2)))
    scaled = (np.stack(tiles).transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    return {"pixel_values": scaled.astype(np.float32), "aspect_ratios": np.asarray(grids)}


def _views_of_llama4(inputs: Inputs, index: int) -> np.ndarray:
    counts = [int(rows * columns + (rows * columns > 1)) for rows, columns in inputs["aspect_ratios"]]
    first = sum(counts[:index])
    return inputs["pixel_values"][first : first + counts[index]]


def _llama4_features(model: Any, inputs: Inputs) -> list[Any]:
    return [model.multi_modal_projector(model.get_image_features(**inputs).last_hidden_state)]


def _llama4_logits(model: Any, tokens: torch.Tensor, inputs: Inputs, _: Inputs) -> torch.Tensor:
    """As the reference's outer class, which fails where it looks for what its text does not return."""
    embeds, is_image = model.get_input_embeddings()(tokens), tokens == model.config.image_token_id
    [features] = _llama4_features(model, inputs)
    embeds = embeds.masked_scatter(is_image[..., None], features)
    return model.language_model(inputs_embeds=embeds).logits


_LLAMA4 = VisionFamily(
    "Llama 4",
    Idefics3ImageProcessorPil(),  # of which only what it is called is written; see `_call_llama4`
    _call_llama4,
    {
        **{"processor_class": "Llama4Processor", "patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        "image_processor": {
            **{"image_processor_type": "Llama4ImageProcessor", "size": {"height": TILE, "width": TILE}},
            "max_patches": 4,
        },
    },
    lambda inputs, index: Llama4Processor._prompt_split_image(
        SimpleNamespace(**_LLAMA4_TOKENS), inputs["aspect_ratios"][index], (TILE // PATCH // 2) ** 2
    ),
    (*("<|image|>", "<|image_start|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"), "<|image_end|>"),
    "<|image|>",
    _views_of_llama4,
    features=_llama4_features,
    logits=_llama4_logits,
    slow=True,
    has_image_processor=False,
)

_LFM2_TOKENS = {
    **{"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"},
    **{"image_thumbnail_token": "<|img_thumbnail|>"},
}
_LFM2_SETTINGS = {
    **{"downsample_factor": 2, "min_tiles": 2, "max_tiles": 4, "use_thumbnail": True, "min_image_tokens": 4},
    **{"max_image_tokens": 16, "encoder_patch_size": PATCH, "tile_size": TILE, "max_pixels_tolerance": 2.0},
}


def _call_lfm2(_: Any, images: list[Image]) -> Inputs:
    """As `_call_llama4`."""
    processor = image_processing("lfm2_vl").Lfm2VlImageProcessor
    sizes = {name: _LFM2_SETTINGS[name] for name in ("max_image_tokens", "encoder_patch_size", "downsample_factor")}
    whole = sizes | {"min_image_tokens": _LFM2_SETTINGS["min_image_tokens"]}
    me = SimpleNamespace(_target_ratios=lambda *limits: processor._target_ratios.__wrapped__(None, *limits))
    views: list[np.ndarray] = []
    grids, targets, counts = [], [], []
    for image in images:
        target = processor.smart_resize(None, image.height, image.width, **whole)
        is_large = processor._is_image_too_large(None, image.height, image.width, **sizes, max_pixels_tolerance=2.0)
        columns = rows = 1
        before = len(views)
        if is_large:
            columns, rows, *_ = processor._get_grid_layout(me, image.height, image.width, 2, 4, TILE)
            tiles = np.asarray(image.resize((columns * TILE, rows * TILE), resample=2))
            views += [each for row in np.split(tiles, rows) for each in np.split(row, columns, axis=1)]
        views.append(np.asarray(image.resize(target, resample=2)))
        grids.append((rows, columns))
        targets.append((target[1], target[0]))
        counts.append(len(views) - before)
    scaled = [((view.transpose(2, 0, 1) / 255 - 0.5) / 0.5).astype(np.float32) for view in views]
    shapes = [(view.shape[1] // PATCH, view.shape[2] // PATCH) for view in scaled]
    most = max(rows * columns for rows, columns in shapes)
    patches, mask = np.zeros((len(views), most, 3 * PATCH**2), np.float32), np.zeros((len(views), most), np.int64)
    for i, (view, (rows, columns)) in enumerate(zip(scaled, shapes, strict=True)):
        own = view.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        patches[i, : len(own)], mask[i, : len(own)] = own, 1
    return {
        **{"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": np.asarray(shapes)},
        **{"views": scaled, "counts": counts, "image_grids": grids, "targets": targets},
    }


def _replace_lfm2(inputs: Inputs, index: int) -> str:
    processor, (rows, columns) = Lfm2VlProcessor, inputs["image_grids"][index]
    per_tile = processor._compute_tokens_per_tile(None, TILE, PATCH, 2)
    of_whole = processor._compute_tokens_for_image(None, inputs["targets"][index], PATCH, 2)
    tokens = SimpleNamespace(**_LFM2_TOKENS)
    return processor._build_image_tokens(tokens, rows, columns, per_tile, of_whole, True, True)


def _lfm2_features(model: Any, inputs: Inputs) -> list[Any]:
    return [model.model.get_image_features(**inputs).pooler_output]


_LFM2_VL = VisionFamily(
    "LFM2-VL",
    Idefics3ImageProcessorPil(),  # see `_LLAMA4`
    _call_lfm2,
    {
        "processor_class": "Lfm2VlProcessor",
        "image_processor": {"image_processor_type": "Lfm2VlImageProcessor", **_LFM2_SETTINGS},
    },
    _replace_lfm2,
    (*_LFM2_TOKENS.values(), *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))),
    "<image>",
    lambda inputs, index: inputs["views"][sum(inputs["counts"][:index]) :][: inputs["counts"][index]],
    features=_lfm2_features,
    cache="100KiB",
    slow=True,
    has_image_processor=False,
)


def _call_kimi(processor: Any, images: list[Image]) -> Inputs:
    """The reference's processor needs torchvision: here Pillow resizes, and its function chooses the sizes."""
    patches, grids, views = [], [], []
    for image in images:
        (height, width), padded = image_processing("kimi_k25").navit_resize(
            image.height, image.width, PATCH, MERGE, _KIMI_SETTINGS["in_patch_limit"], 12
        )
        pixels = np.zeros((*padded, 3), np.uint8)
        pixels[:height, :width] = np.asarray(image.resize((width, height), resample=3))
        scaled = ((pixels.transpose(2, 0, 1) / 255 - 0.5) / 0.5).astype(np.float32)
        rows, columns = (each // PATCH for each in padded)
        views.append(scaled)
        grids.append([1, rows, columns])
        in_patches = scaled.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
        patches.append(in_patches.reshape(-1, 3, PATCH, PATCH))
    return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.asarray(grids), "views": views}


_KIMI_NAMES = {
    **{"language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector."},
    **{"vision_tower.encoder.patch_embed.": "vision_tower.patch_embed."},
}
_KIMI_KEYS = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
_KIMI_KEYS |= {
    key: f"vt_{key}" for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}


def _publish_kimi(folder: Path) -> None:
    """Undoes what transformers loses when it writes the published names, and names the tower's settings as they are."""
    tensors = load_file(folder / "model.safetensors")
    for written, published in _KIMI_NAMES.items():
        tensors = {
            published + name.removeprefix(written) if name.startswith(written) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["vision_config"] = {_KIMI_KEYS.get(key, key): value for key, value in vision.items() if "rope" not in key}
    config["vision_config"] |= {"mm_hidden_size": 32, "pos_emb_type": "divided_fixed", "merge_type": "sd2_tpool"}
    (folder / "config.json").write_text(json.dumps(config))


_KIMI_SETTINGS = {
    **{"in_patch_limit": 60, "patch_size": PATCH, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    **{"merge_kernel_size": MERGE, "fixed_output_tokens": None, "patch_limit_on_one_side": 12},
}
_KIMI = VisionFamily(
    "Kimi K2.5",
    Idefics3ImageProcessorPil(),  # see `_LLAMA4`
    _call_kimi,
    {
        "image_processor": {
            **{"media_proc_cfg": _KIMI_SETTINGS, "auto_map": {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"}}
        }
    },
    _replaced(Kimi_K25Processor, image_token="<|media_pad|>", image_processor=SimpleNamespace(merge_size=MERGE)),
    ("<|media_begin|>", "<|media_pad|>"),
    "<|media_pad|>",
    lambda inputs, index: inputs["views"][index][None],
    cache="48KiB",
    has_image_processor=False,
    publish=_publish_kimi,
)


def _call_kimi_k3(_: Any, images: list[Image]) -> Inputs:
    patches, grids, views = [], [], []
    for image in images:
        view = (upright_pixels(image).transpose(2, 0, 1) / 255 - 0.5).astype(np.float32) / np.float32(0.5)
        rows, columns = (each // PATCH for each in view.shape[1:])
        views.append(view)
        grids.append([1, rows, columns])
        in_patches = view.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
        patches.append(in_patches.reshape(-1, 3, PATCH, PATCH))
    sizes = [image.size for image in images]
    return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids), "views": views, "sizes": sizes}


def _replace_kimi_k3(inputs: Inputs, index: int) -> str:
    width, height = inputs["sizes"][index]
    count = inputs["image_grid_thw"][index].prod() // MERGE**2
    return f"<|media_begin|>image {width}x{height}<|media_content|>{'<|media_pad|>' * count}<|media_end|>"


def _kimi_k3_logits(model: Any, tokens: torch.Tensor, inputs: Inputs, _: Inputs) -> torch.Tensor:
    return model.logits(tokens, token_id("<|media_pad|>", _KIMI_K3.all_special), model.features(**inputs))


class KimiK3Family(VisionFamily):
    """Kimi K3, which transformers lacks."""

    def write(self, folder: Path) -> Any:
        """Fills a folder as the maker publishes it; returns the reference in torch."""
        row = _ROWS[self.name]
        write_tokenizer(folder, self.all_special, self.placeholder)
        auto_map = {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor"}
        settings = {"auto_map": auto_map, "media_proc_cfg": KIMI_K3_SETTINGS}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        values = {key: value for key, value in (TEXT | row["text"]).items() if key not in row["without"]}
        text = transformers.KimiLinearConfig(**values)
        ids = {key: token_id(token, self.all_special) for key, token in row["tokens"].items()}
        config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32"}
        config |= {"text_config": text.to_dict(), "vision_config": row["vision"], **row["settings"], **ids}
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        model = KimiK3VisionReference(text, row["vision"]).float().eval()
        randomize(model)
        tensors = {name: tensor.contiguous().numpy() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        return model


_KIMI_K3 = KimiK3Family(
    "Kimi K3",
    None,
    _call_kimi_k3,
    {},
    _replace_kimi_k3,
    ("<|kimi_image_placeholder|>", "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    "<|kimi_image_placeholder|>",
    lambda inputs, index: inputs["views"][index][None],
    features=lambda model, inputs: [model.features(**inputs)],
    logits=_kimi_k3_logits,
    has_image_processor=False,
)


def _call_muse_glimmer(_: Any, images: list[Image]) -> Inputs:
    """The reference's processor needs torchvision: here Pillow resizes, and its function chooses the sizes."""
    patches, grids, views = [], [], []
    for image in images:
        height, width = image_processing("muse_glimmer").smart_resize(
            image.height, image.width, PATCH * MERGE, _MUSE_GLIMMER_SETTINGS["max_image_tokens"]
        )
        pixels = np.asarray(image.resize((width, height), resample=1)).transpose(2, 0, 1)
        scaled = ((pixels / 255 - 0.5) / 0.5).astype(np.float32)
        rows, columns = height // PATCH, width // PATCH
        views.append(scaled)
        grids.append([1, rows, columns])
        in_patches = scaled.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
        # Two frames that are the same.
        patches.append(np.tile(in_patches.reshape(rows * columns, -1), 2))
    return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.asarray(grids), "views": views}


_MUSE_GLIMMER_SETTINGS = {"max_image_tokens": 30, "patch_size": PATCH, "merge_size": MERGE}
_MUSE_GLIMMER_TOKENS = {
    "image_start_token": "<|image_start|>",
    "image_token": "<|patch|>",
    "image_end_token": "<|image_end|>",
}
_MUSE_GLIMMER = VisionFamily(
    "Muse Glimmer",
    Idefics3ImageProcessorPil(),  # see `_LLAMA4`
    _call_muse_glimmer,
    {
        "processor_class": "MuseGlimmerProcessor",
        "image_processor": {"image_processor_type": "MuseGlimmerImageProcessor", **_MUSE_GLIMMER_SETTINGS},
    },
    _replaced(MuseGlimmerProcessor, **_MUSE_GLIMMER_TOKENS, image_processor=SimpleNamespace(merge_size=MERGE)),
    tuple(_MUSE_GLIMMER_TOKENS.values()),
    "<|patch|>",
    lambda inputs, index: inputs["views"][index][None],
    slow=True,
    has_image_processor=False,
)


def _views_of_minicpm(inputs: Inputs, index: int) -> list[np.ndarray]:
    """Patches lie next to each other, whatever their row."""
    counts, views, first = inputs["num_patches_per_image"], [], 0
    for rows, columns in inputs["target_sizes"]:
        last = first + rows * columns * PATCH
        patches = inputs["pixel_values"][0][:, :, first:last].reshape(3, PATCH, rows, columns, PATCH)
        views.append(patches.transpose(0, 2, 1, 3, 4).reshape(3, rows * PATCH, columns * PATCH))
        first = last
    return views[sum(counts[:index]) :][: counts[index]]


_MINICPM_TOKENS = {
    **{"image_token": "<|image_pad|>", "image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
}


def _replace_minicpm(patches_of_token: int) -> Callable[[Inputs, int], str]:
    processor = SimpleNamespace(**_MINICPM_TOKENS, slice_mode=True)
    return lambda inputs, index: (
        f"<image_id>{index}</image_id>"
        + MiniCPMV4_6Processor.replace_image_token(processor, inputs, index, image_token_divisor=patches_of_token)
    )


_MINICPM_V = VisionFamily(
    "MiniCPM-V 4.6",
    MiniCPMV4_6ImageProcessorPil(scale_resolution=40, patch_size=PATCH, max_slice_nums=4),
    lambda processor, images: dict(processor(images, return_tensors="np")),
    {"processor_class": "MiniCPMV4_6Processor"},
    _replace_minicpm(16),
    (*_MINICPM_TOKENS.values(), "<image_id>", "</image_id>"),
    "<|image_pad|>",
    _views_of_minicpm,
    slow=True,
)
_MINICPM_V_4X = dataclasses.replace(
    _MINICPM_V,
    name="MiniCPM-V 4.6, four patches a token",
    image_processor=MiniCPMV4_6ImageProcessorPil(
        scale_resolution=40, patch_size=PATCH, max_slice_nums=4, downsample_mode="4x"
    ),
    replace=_replace_minicpm(4),
    cache="240KiB",
)

FAMILIES = (
    *(_MISTRAL3, _LIGHTON_OCR, _IDEFICS3, _SMOLVLM, _INTERNVL, _GEMMA3, _GEMMA4, _GEMMA4_CAUSAL, _GEMMA4_UNIFIED),
    *(_QWEN2_VL, _QWEN2_5_VL, _QWEN3_VL, _QWEN3_VL_MOE, _QWEN3_5, _QWEN3_5_MOE, _QWEN3_8_FLASH_NEXT, _MINIMAX_M3),
    _MISTRAL_LARGE_4,
    *(_GLM_5_3_FLASH, _INKLING, _INKLING_2),
    *(_GLM_4_1V, _GLM_4_5V, _GLM_OCR, _LLAVA, _LLAVA_NEXT, _LLAVA_SIGLIP, _PIXTRAL_12B, _LLAMA4, _LFM2_VL),
    *(
        _LLAVA_ONEVISION,
        _LLAVA_ONEVISION_ALONE,
        _DEEPSEEK_VL,
        _KIMI,
        _KIMI_K3,
        _VIP_LLAVA,
        _AYA,
        _COMMAND_A,
        _EXAONE_4_5,
    ),
    *(
        _LLAVA_NEXT_VIDEO,
        _PADDLEOCR_VL,
        _GRANITE_VISION,
        _MINICPM_V,
        _MINICPM_V_4X,
        _LFM3_VL,
        _INTERNVL_3_5,
        _MUSE_GLIMMER,
    ),
)
