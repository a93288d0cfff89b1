"""A Hugging Face checkpoint's tensors as those of a GGUF file: the inverse of `jaxis.loading.gguf.names`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.bringup.convert.expert_stacks import split_gate_up
from jaxis.errors import CheckpointError
from jaxis.loading.gguf.tensor_names import GGUFNames

_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
}
# What llama.cpp reads only as float32, besides vectors.
_ROUTER = "ffn_gate_inp"

Make = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the GGUF file to be written.

    Attributes:
      shape: NumPy shape of its elements.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    make: Make

    @property
    def is_float32(self) -> bool:
        """True if it is float32 in a file of any type: llama.cpp reads vectors and routers only so."""
        return len(self.shape) < 2 or not self.name.endswith(".weight") or f".{_ROUTER}." in self.name


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that the changes to tensors depend on.

    Attributes:
      num_layers: Layers of the model itself, without prediction layers.
      nope_dim: Dimensions of a head's key that latent attention does not rotate.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    nope_dim: int = 0


def gguf_tensors(
    shapes: Mapping[str, tuple[int, ...]], names: GGUFNames, sizes: ModelSizes, source: str
) -> list[FileTensor]:
    """Returns the file's tensors, in the order of the layers, for the tensors that the checkpoint's model uses.

    Raises CheckpointError, with the name `source`, if a tensor has no place in a file of these `names`.
    """
    inverse = _Inverse(shapes, names, sizes)
    found = [tensor for name in shapes for tensor in inverse.tensors_of(name)]
    if inverse.without_place:
        raise CheckpointError(
            f"{source}: llama.cpp's files of this architecture have no place for {inverse.without_place[0]} "
            f"({len(inverse.without_place)} such tensors)"
        )
    return sorted(found, key=lambda tensor: _place(tensor.name))


class _Inverse:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], names: GGUFNames, sizes: ModelSizes) -> None:
        self._shapes, self._names, self._sizes = shapes, names, sizes
        self._base_of = {target: base for base, target in self._names.block.items()}
        self.without_place: list[str] = []

    def tensors_of(self, name: str) -> list[FileTensor]:
        """Returns the file's tensors whose first source is this one."""
        if name in _TOP_LEVEL:
            adds_one = self._names.adds_one_to_norms and name == "model.norm.weight"
            return [self._single(_TOP_LEVEL[name], name, _add_one if adds_one else _same)]
        match = _OF_LAYER.fullmatch(name)
        if match is None:
            self.without_place.append(name)
            return []
        layer, rest = int(match[1]), match[2]
        if layer >= self._sizes.num_layers:
            return []  # a prediction layer
        found = self._of_layer(name, f"blk.{layer}.", rest)
        if found is None:
            self.without_place.append(name)
        return found or []

    def _of_layer(self, name: str, prefix: str, rest: str) -> list[FileTensor] | None:
        """Returns None if there is no place for it."""
        if rest.startswith(self._names.experts + "."):
            return self._of_experts(name, prefix, rest)
        if rest == "self_attn.kv_b_proj.weight" and "attn_k_b" in self._names.block:
            return self._of_latents(name, prefix)
        if base := self._base_of.get(f"{rest}="):  # a whole name
            return [self._single(f"{prefix}{base}.{'bias' if rest.endswith('bias') else 'weight'}", name, _same)]
        module, _, suffix = rest.rpartition(".")
        base = self._base_of.get(module)
        if base is None or suffix not in ("weight", "bias"):
            return None
        return [self._single(f"{prefix}{base}.{suffix}", name, self._change(base))]

    def _change(self, base: str) -> Callable[[np.ndarray], np.ndarray]:
        if self._names.permutes_rope and base in ("attn_q", "attn_k"):
            return _permute(self._sizes.num_heads if base == "attn_q" else self._sizes.num_kv_heads)
        return _add_one if self._names.adds_one_to_norms and base.endswith("_norm") else _same

    def _of_experts(self, name: str, prefix: str, rest: str) -> list[FileTensor] | None:
        kinds = dict(zip(self._names.projections, ("gate", "up", "down"), strict=True))
        if match := _OF_EXPERT.fullmatch(rest):
            if match[3] not in kinds:
                return None
            if match[2] != "0":
                return []
            return [self._stack(f"{prefix}ffn_{kinds[match[3]]}_exps.{match[4]}", name)]
        leaf = rest.rpartition(".")[2]
        if self._names.stack is None or leaf not in (
            "gate_up_proj",
            "down_proj",
            "gate_up_proj_bias",
            "down_proj_bias",
        ):
            return None
        shape, is_bias = self._shapes[name], leaf.endswith("_bias")
        suffix = "bias" if is_bias else "weight"
        if leaf.startswith("down"):
            down_shape = shape if is_bias else (shape[0], shape[2], shape[1])
            return [FileTensor(f"{prefix}ffn_down_exps.{suffix}", down_shape, (name,), _transpose(is_bias))]
        half = (shape[0], shape[-1] // 2) if is_bias else (shape[0], shape[2] // 2, shape[1])
        return [
            FileTensor(
                f"{prefix}ffn_{kind}_exps.{suffix}", half, (name,), _half(part, self._names.stack.interleaved, is_bias)
            )
            for part, kind in enumerate(("gate", "up"))
        ]

    def _stack(self, stacked: str, first: str) -> FileTensor:
        before, _, after = first.partition(".experts.0.")
        count = 0
        while f"{before}.experts.{count}.{after}" in self._shapes:
            count += 1
        sources = tuple(f"{before}.experts.{i}.{after}" for i in range(count))
        return FileTensor(stacked, (count, *self._shapes[first]), sources, np.stack)

    def _of_latents(self, name: str, prefix: str) -> list[FileTensor]:
        """Splits kv_b_proj [H * (nope + v), latent] into its two parts, the one of keys transposed."""
        rows, latent = self._shapes[name]
        heads, nope = self._sizes.num_heads, self._sizes.nope_dim

        def keys(sources: Sequence[np.ndarray]) -> np.ndarray:
            return sources[0].reshape(heads, -1, latent)[:, :nope].swapaxes(1, 2)

        def values(sources: Sequence[np.ndarray]) -> np.ndarray:
            return sources[0].reshape(heads, -1, latent)[:, nope:]

        return [
            FileTensor(f"{prefix}attn_k_b.weight", (heads, latent, nope), (name,), keys),
            FileTensor(f"{prefix}attn_v_b.weight", (heads, rows // heads - nope, latent), (name,), values),
        ]

    def _single(self, stored: str, name: str, change: Callable[[np.ndarray], np.ndarray]) -> FileTensor:
        return FileTensor(stored, self._shapes[name], (name,), lambda sources: change(sources[0]))


def _same(tensor: np.ndarray) -> np.ndarray:
    return tensor


def _add_one(norm: np.ndarray) -> np.ndarray:
    return norm.astype(np.float32) + np.float32(1)


def _permute(num_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Makes the two halves of each head's rows alternate."""

    def change(rows: np.ndarray) -> np.ndarray:
        halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    return change


def _transpose(is_bias: bool) -> Make:
    return lambda sources: sources[0] if is_bias else sources[0].swapaxes(1, 2)


def _half(part: int, interleaved: bool, is_bias: bool) -> Make:
    def make(sources: Sequence[np.ndarray]) -> np.ndarray:
        half = split_gate_up(sources[0], interleaved=interleaved)[part]
        return half if is_bias else half.swapaxes(1, 2)

    return make


def _place(name: str) -> tuple[int, str]:
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]), name) if match else (-1, name)
