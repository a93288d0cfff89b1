"""The vision part of a model in GGUF, its `mmproj` file, read as if it were the files of a Hugging Face checkpoint.

The keys and names are llama.cpp's (`conversion/*.py`, `tools/mtmd/clip.cpp`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.closing import Closing
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.container import GGUFFile, GGUFTensor, shortest_float

Floats = Callable[[GGUFTensor, np.ndarray], np.ndarray]
Values = dict[str, Any]

_OF_BLOCK = re.compile(r"v\.blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
_OF_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_PATCHES, _SECOND_PATCHES = "v.patch_embd.weight", "v.patch_embd.weight.1"
_SOFT_NORM = "mm.soft_emb_norm.weight"
_QWEN_WINDOW = 112  # pixels; files of Qwen2.5-VL do not say it


@dataclass(frozen=True)
class _Names:
    """Names of a kind's tensors in Hugging Face checkpoints.

    `blocks` is the list of layers. `block` maps a name in the file, without `v.blk.N.` and `.weight`, to a name in the
    layer, and `top_level` one without `.weight` or `.bias` to a name outside layers.
    """

    blocks: str
    block: Mapping[str, str]
    top_level: Mapping[str, str]


_QWEN_BLOCK = {"ln1": "norm1", "ln2": "norm2", "attn_qkv": "attn.qkv", "attn_out": "attn.proj"}
_QWEN_TOP = {
    **{"v.patch_embd": "visual.patch_embed.proj", "v.position_embd": "visual.pos_embed"},
    **{"v.post_ln": "visual.merger.norm", "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2"},
}
_SIGLIP_BLOCK = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    **{"attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"},
    **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
}


def _siglip_names(tower: str, projection: Mapping[str, str]) -> _Names:
    top_level = {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
    }
    return _Names(f"{tower}.encoder.layers", _SIGLIP_BLOCK, {**top_level, **projection})


def _qwen_names(**mlp: str) -> _Names:
    return _Names(
        "visual.blocks", {**_QWEN_BLOCK, **{f"ffn_{key}": f"mlp.{name}" for key, name in mlp.items()}}, _QWEN_TOP
    )


_NAMES: Mapping[str, _Names] = {
    "qwen2vl_merger": _qwen_names(up="fc1", down="fc2"),
    "qwen2.5vl_merger": _qwen_names(gate="gate_proj", up="up_proj", down="down_proj"),
    "qwen3vl_merger": _qwen_names(up="linear_fc1", down="linear_fc2"),
    "gemma3": _siglip_names(
        "vision_tower",
        {
            "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
        },
    ),
    "idefics3": _siglip_names("vision_model", {"mm.model.fc": "connector.modality_projection.proj"}),
}


class MmprojFile(Closing):
    """The vision part of a model. A context manager.

    Attributes:
      kind: llama.cpp's name of the projector after the tower, such as `qwen3vl_merger`.
      config: The tower's part of config.json.
      processor, image_processor: Content of the corresponding processor_config.json and preprocessor_config.json.
      size: E, of the embeddings.
      total_bytes: Bytes of all tensors in the file.

    Raises:
      CheckpointError: On opening, if the file is broken or is not a model's vision part.
      ConfigError: The kind is not supported, or there are unknown keys.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        try:
            self._read()
        except (CheckpointError, ConfigError):
            self.close()
            raise
        self.total_bytes = sum(each.nbytes for each in self._file.tensors.values())

    def _read(self) -> None:
        metadata, tensors = self._file.metadata, self._file.tensors
        if metadata.get("general.architecture") != "clip":
            raise CheckpointError(f"{self.path} is not the vision part of a model: give its mmproj file")
        keys = Keys(metadata, tensors, str(self.path))
        self.kind: str = keys.get("projector_type") or keys.get("vision.projector_type") or ""
        if self.kind not in _NAMES:
            raise ConfigError(
                f"{self.path} has a vision part of the kind {self.kind!r}; supported are {', '.join(_NAMES)}"
            )
        keys.expect("has_vision_encoder", True)
        self._parts = dict(self._find_parts())
        reader = _Reader(keys, tensors)
        self.size, self.config, self.processor, self.image_processor = reader.read(self.kind)
        keys.check_all_read()

    def iterate(self, floats: Floats) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once, under its Hugging Face name; `floats` converts a `GGUFFile.tensor` to floats."""
        for name, stored in self._parts.items():
            arrays = [floats(self._file.tensors[each], self._file.tensor(each)) for each in stored]
            if stored[0] == _PATCHES and len(arrays) > 1:
                yield name, np.stack(arrays, axis=2)  # of each frame
            elif stored[0] == _SOFT_NORM:
                yield name, arrays[0].astype(np.float32) - np.float32(1)
            else:
                yield name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def close(self) -> None:
        self._file.close()

    def _find_parts(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields (Hugging Face name, tensors in the file that it is made of)."""
        names, tensors = _NAMES[self.kind], self._file.tensors
        deepstack = sorted({int(match[1]) for match in map(_OF_DEEPSTACK.fullmatch, tensors) if match})
        for stored in tensors:
            base, _, suffix = stored.rpartition(".")
            if stored == _SECOND_PATCHES:
                continue
            if stored == _PATCHES and _SECOND_PATCHES in tensors:
                yield f"{names.top_level[base]}.weight", (_PATCHES, _SECOND_PATCHES)
            elif base in names.top_level:
                # The one that is a parameter itself.
                is_parameter = names.top_level[base].endswith("_weight")
                yield names.top_level[base] if is_parameter else f"{names.top_level[base]}.{suffix}", (stored,)
            elif match := _OF_DEEPSTACK.fullmatch(stored):
                module = "norm" if match[2] == "norm" else f"linear_{match[2]}"
                yield f"visual.deepstack_merger_list.{deepstack.index(int(match[1]))}.{module}.{match[3]}", (stored,)
            elif match := _OF_BLOCK.fullmatch(stored):
                yield from self._part_of_block(match[1], match[2], match[3], names)
            else:
                raise self._unknown(stored)

    def _part_of_block(
        self, layer: str, base: str, suffix: str, names: _Names
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        prefix = f"v.blk.{layer}"
        stored = f"{prefix}.{base}.{suffix}"
        if base in ("attn_q", "attn_k", "attn_v") and "attn_qkv" in names.block:
            if base == "attn_q":
                parts = tuple(f"{prefix}.attn_{each}.{suffix}" for each in "qkv")
                if missing := [part for part in parts if part not in self._file.tensors]:
                    raise CheckpointError(f"{self.path} has no tensor {missing[0]!r}: download it again")
                yield f"{names.blocks}.{layer}.{names.block['attn_qkv']}.{suffix}", parts
            return
        # Older converters wrote the two under each other's name.
        if base in ("ffn_up", "ffn_down") and self._is_swapped(prefix):
            base = "ffn_down" if base == "ffn_up" else "ffn_up"
        if base not in names.block:
            raise self._unknown(stored)
        yield f"{names.blocks}.{layer}.{names.block[base]}.{suffix}", (stored,)

    def _is_swapped(self, prefix: str) -> bool:
        down, norm = (self._file.tensors.get(f"{prefix}.{each}.weight") for each in ("ffn_down", "ln1"))
        return down is not None and norm is not None and down.shape[-1] == norm.shape[0] != down.shape[0]

    def _unknown(self, stored: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor {stored!r} is not one that jaxis knows in a vision part of the kind {self.kind!r}: "
            "use another file of the model"
        )


class _Reader:
    def __init__(self, keys: Keys, tensors: Mapping[str, GGUFTensor]) -> None:
        self._keys, self._tensors = keys, tensors
        keys.ignore("has_text_encoder", "has_audio_encoder", "has_llava_projector", "has_qwen2vl_merger")
        keys.ignore("use_gelu", "use_silu", "vision.projection_dim", "vision.feed_forward_length")  # as tensors have it
        self.image_size, self.patch_size = keys.integer("vision.image_size"), keys.integer("vision.patch_size")
        self.hidden_size, self.depth = keys.integer("vision.embedding_length"), keys.integer("vision.block_count")
        self.num_heads = keys.integer("vision.attention.head_count")
        num_blocks = len({match[1] for match in map(_OF_BLOCK.fullmatch, tensors) if match})
        if self.depth != num_blocks or not min(self.depth, self.patch_size, self.hidden_size, self.num_heads):
            raise ConfigError(
                f"{keys.source} says that its tower has {self.depth} layers of {self.hidden_size} elements in "
                f"{self.num_heads} heads and patches of {self.patch_size} pixels, and has {num_blocks}: "
                "download it again"
            )
        up, down = (self._shape(f"v.blk.0.ffn_{each}.weight") for each in ("up", "down"))
        self.inner_size = max(*up, *down) if up[0] != up[1] else up[0]
        scale = {name: keys.for_layers(f"vision.{name}", 3) for name in ("image_mean", "image_std")}
        if None in scale.values():
            raise ConfigError(f"{keys.source} lacks clip.vision.image_mean or image_std: use another file of the model")
        self.scale = {name: [shortest_float(each) for each in values or ()] for name, values in scale.items()}

    def read(self, kind: str) -> tuple[int, Values, Values, Values]:
        """Returns E, and the contents of config.json, processor_config.json and preprocessor_config.json."""
        if kind == "gemma3":
            return self._gemma3()
        return self._idefics3() if kind == "idefics3" else self._qwen(kind)

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor.shape) < 2:
            raise CheckpointError(f"{self._keys.source} has no tensor {name!r} of two dimensions: download it again")
        return tensor.shape

    def _qwen(self, kind: str) -> tuple[int, Values, Values, Values]:
        keys, size = self._keys, self._shape("mm.2.weight")[0]
        keys.ignore("vision.attention.layer_norm_epsilon")  # always 1e-6; some files have the text's
        merge_size = keys.integer("vision.spatial_merge_size", 2) or 2
        is_third = kind == "qwen3vl_merger"
        side = self.patch_size * merge_size
        # As the models were published.
        least, most = (64, 16_384) if is_third else (4, 16_384)
        vision: Values = {"depth": self.depth, "num_heads": self.num_heads, "patch_size": self.patch_size}
        vision["spatial_merge_size"] = merge_size
        name = {"qwen2vl_merger": "Qwen2VL", "qwen2.5vl_merger": "Qwen2_5_VL"}.get(kind, "Qwen3VL")
        if kind == "qwen2vl_merger":
            # Half an element more, since the product is rounded down.
            ratio = (self.inner_size + 0.5) / self.hidden_size
            vision |= {"embed_dim": self.hidden_size, "mlp_ratio": ratio, "hidden_size": size}
        else:
            vision |= {"hidden_size": self.hidden_size, "intermediate_size": self.inner_size, "out_hidden_size": size}
        if kind == "qwen2.5vl_merger":
            vision["tokens_per_second"] = 2  # as published
            every = keys.integer("vision.n_wa_pattern")
            vision["window_size"] = keys.integer("vision.window_size", _QWEN_WINDOW)
            vision["fullatt_block_indexes"] = [i for i in range(self.depth) if every and (i + 1) % every == 0]
        if is_third:
            deep = keys.for_layers("vision.is_deepstack_layers", self.depth) or []
            vision["deepstack_visual_indexes"] = [i for i, is_deep in enumerate(deep) if is_deep]
            vision["num_position_embeddings"] = self._shape("v.position_embd.weight")[0]
        pixels = {
            "shortest_edge": keys.integer("vision.image_min_pixels", least * side**2),
            "longest_edge": keys.integer("vision.image_max_pixels", most * side**2),
        }
        image = {"patch_size": self.patch_size, "merge_size": merge_size, "size": pixels, "resample": 3, **self.scale}
        return size, {"vision_config": vision}, {"processor_class": f"{name}Processor"}, image

    def _siglip(self, model_type: str, epsilon: float) -> Values:
        return {
            **{"model_type": model_type, "hidden_size": self.hidden_size, "intermediate_size": self.inner_size},
            **{"num_hidden_layers": self.depth, "num_attention_heads": self.num_heads, "layer_norm_eps": epsilon},
            **{"image_size": self.image_size, "patch_size": self.patch_size},
        }

    def _num_tokens(self, factor: int) -> int:
        """Returns the embeddings of an image of squares with `factor` ** 2 patches each."""
        side = self.image_size // self.patch_size // factor
        places = self._shape("v.position_embd.weight")[0]
        if side < 1 or (self.image_size // self.patch_size) ** 2 != places:
            raise ConfigError(
                f"{self._keys.source} has images of {self.image_size} pixels, and {places} places of patches of "
                f"{self.patch_size}: download it again"
            )
        return side**2

    def _gemma3(self) -> tuple[int, Values, Values, Values]:
        size = self._shape("mm.input_projection.weight")[1]
        factor = self._keys.integer("vision.projector.scale_factor", 4) or 4
        num_tokens = self._num_tokens(factor)
        vision = self._siglip("siglip_vision_model", self._keys.get("vision.attention.layer_norm_epsilon", 1e-6))
        config = {
            **{"vision_config": vision, "mm_tokens_per_image": num_tokens},
            "text_config": {"hidden_size": size},
        }
        square = {"height": self.image_size, "width": self.image_size}
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": num_tokens}
        return size, config, processor, {"size": square, "resample": 2, **self.scale}

    def _idefics3(self) -> tuple[int, Values, Values, Values]:
        keys, size = self._keys, self._shape("mm.model.fc.weight")[0]
        factor = keys.integer("vision.projector.scale_factor", 2) or 2
        num_tokens = self._num_tokens(factor)
        epsilon = keys.get("vision.attention.layer_norm_epsilon", 1e-6)
        # llama.cpp's converter writes 1e-5 where config.json leaves it to the model's default, which is 1e-6.
        vision = self._siglip("idefics3_vision", 1e-6 if epsilon == 1e-5 else epsilon)
        config = {"vision_config": vision, "scale_factor": factor, "text_config": {"hidden_size": size}}
        longest = keys.integer("vision.preproc_image_size", 4 * self.image_size)
        image = {
            **{"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": self.image_size}},
            **{"resample": 1, **self.scale},
        }
        return size, config, {"processor_class": "Idefics3Processor", "image_seq_len": num_tokens}, image
