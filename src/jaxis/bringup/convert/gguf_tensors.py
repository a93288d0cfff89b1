"""A Hugging Face checkpoint's tensors as those of a GGUF file: what `parts_of` reads, backwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxis.bringup.convert.expert_stacks import split_gate_up
from jaxis.errors import CheckpointError
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf.names import parts_of
from jaxis.loading.gguf.stored_part import Sizes, StoredPart
from jaxis.loading.gguf.tensor_names import GGUFNames
from jaxis.loading.gguf_block_types import FLOAT32

_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
_STACK = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LATENTS = ".kv_b_proj.weight"
# What llama.cpp reads only as float32, besides vectors.
_ROUTER = "ffn_gate_inp"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the GGUF file to be written.

    Attributes:
      shape: NumPy shape of its elements.
      sources: Tensors of the checkpoint that `make` takes.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    make: Callable[[Sequence[np.ndarray]], np.ndarray]

    @property
    def is_float32(self) -> bool:
        """True if it is float32 in a file of any type: llama.cpp reads vectors and routers only so."""
        return len(self.shape) < 2 or not self.name.endswith(".weight") or f".{_ROUTER}." in self.name


@dataclass(frozen=True)
class _Piece:
    """A tensor as the reader names it, made of the checkpoint's tensor `source`."""

    source: str
    shape: tuple[int, ...]
    make: Callable[[np.ndarray], np.ndarray] = lambda tensor: tensor


def gguf_tensors(
    shapes: Mapping[str, tuple[int, ...]], names: GGUFNames, sizes: Sizes, nope_dim: int, source: str
) -> list[FileTensor]:
    """Returns the file's tensors, in the order of the layers, for the tensors that the checkpoint's model uses.

    `nope_dim` is the dimensions of a head's key that latent attention does not rotate.

    Raises CheckpointError, with the name `source`, if a tensor has no place in a file of these `names`.
    """
    pieces = {
        piece_name: piece
        for name, shape in shapes.items()
        if _layer(name) < sizes.num_layers  # not of a prediction layer
        for piece_name, piece in _pieces(name, shape, names, sizes.num_heads, nope_dim)
    }
    found: dict[str, FileTensor] = {}
    for stored in _file_names(names, sizes.num_layers):
        parts = parts_of(GGUFTensor(stored, FLOAT32, (sizes.num_experts,), 0), names, sizes)
        if parts and parts[0].name not in found and (tensor := _file_tensor(stored, parts, pieces)) is not None:
            found[parts[0].name] = tensor
    placed = {name for tensor in found.values() for name in tensor.sources}
    if without_place := [
        name for name in dict.fromkeys(piece.source for piece in pieces.values()) if name not in placed
    ]:
        raise CheckpointError(
            f"{source}: llama.cpp's files of this architecture have no place for {without_place[0]} "
            f"({len(without_place)} such tensors)"
        )
    return sorted(found.values(), key=lambda tensor: (_layer(tensor.name), tensor.name))


def _layer(name: str) -> int:
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


def _file_names(names: GGUFNames, num_layers: int) -> Iterator[str]:
    """Yields the names of all tensors that a file can have."""
    experts = {f"ffn_{projection}_exps": "" for projection in ("gate", "up", "down")}
    yield from _with_suffixes(names.of_top_level)
    for layer in range(num_layers):
        yield from (f"blk.{layer}.{name}" for name in _with_suffixes({**names.of_block, **experts}))


def _with_suffixes(names: Mapping[str, str]) -> Iterator[str]:
    for stored, name in names.items():
        if name.endswith("="):  # one tensor
            yield f"{stored}.{'bias' if name.endswith('bias=') else 'weight'}"
        else:
            yield from (f"{stored}.weight", f"{stored}.bias")


def _file_tensor(stored: str, parts: list[StoredPart], pieces: Mapping[str, _Piece]) -> FileTensor | None:
    """Returns the file's tensor with these parts; None if the checkpoint lacks them."""
    if (stack := pieces.get(_EXPERT.sub(".experts.", parts[0].name))) is not None and parts[0].index:
        return FileTensor(stored, stack.shape, (stack.source,), lambda sources: stack.make(sources[0]))
    members = [pieces[part.name] for part in parts if part.name in pieces]
    if len(members) < len(parts):
        return None

    def make(sources: Sequence[np.ndarray]) -> np.ndarray:
        made = [part.stored_of(piece.make(each)) for part, piece, each in zip(parts, members, sources, strict=True)]
        return np.stack(made) if parts[0].index else made[0]

    shape = (len(parts), *members[0].shape) if parts[0].index else members[0].shape
    return FileTensor(stored, shape, tuple(piece.source for piece in members), make)


def _pieces(
    name: str, shape: tuple[int, ...], names: GGUFNames, num_heads: int, nope_dim: int
) -> Iterator[tuple[str, _Piece]]:
    """Yields (name, piece) for a tensor of the checkpoint; the name of a stack of experts lacks their number."""
    if name.endswith(_LATENTS) and "attn_k_b" in names.of_block:
        latent = shape[1]

        def heads(tensor: np.ndarray) -> np.ndarray:
            return tensor.reshape(num_heads, -1, latent)

        module, value_dim = name.removesuffix(".weight"), shape[0] // num_heads - nope_dim
        keys = _Piece(name, (num_heads, latent, nope_dim), lambda tensor: heads(tensor)[:, :nope_dim].swapaxes(1, 2))
        yield f"{module}.k_b", keys
        yield f"{module}.v_b", _Piece(name, (num_heads, value_dim, latent), lambda tensor: heads(tensor)[:, nope_dim:])
    elif names.stack is not None and (match := _STACK.fullmatch(name)):
        yield from _pieces_of_stack(match, shape, is_interleaved=names.stack.interleaved)
    else:
        yield name, _Piece(name, shape)


def _pieces_of_stack(
    match: re.Match[str], shape: tuple[int, ...], *, is_interleaved: bool
) -> Iterator[tuple[str, _Piece]]:
    """Yields the projections of all experts; a stack has outputs on its last axis, a file has them before inputs."""
    is_bias = match[3] is not None

    def turned(tensor: np.ndarray) -> np.ndarray:
        return tensor if is_bias else tensor.swapaxes(1, 2)

    def half(part: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda tensor: turned(split_gate_up(tensor, interleaved=is_interleaved)[part])

    makes = {"down": turned} if match[2] == "down" else {"gate": half(0), "up": half(1)}
    for projection, make in makes.items():
        outputs = shape[-1] // len(makes)
        stored = (shape[0], outputs) if is_bias else (shape[0], outputs, shape[1])
        yield f"{match[1]}.{projection}_proj.{'bias' if is_bias else 'weight'}", _Piece(match[0], stored, make)
