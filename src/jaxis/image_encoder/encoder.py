"""The `InputEncoder` of images: a loaded image encoder, and the images that it has encoded."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.engine.execution.device_state import DeviceState
from jaxis.engine.execution.model_arrays import bytes_on_devices
from jaxis.engine.execution.program_context import ProgramContext, jit
from jaxis.engine.execution.program_key import Compiled, RunsOn
from jaxis.engine.execution.programs import Programs
from jaxis.errors import RequestError
from jaxis.image_encoder.slices import SlicedProgram, SliceProgram, cut
from jaxis.kernels.platform import target_platform
from jaxis.models.common.towers.patches import pack_patches, packed_size, unpack_patches
from jaxis.models.common.towers.tower import VisionTower
from jaxis.prompts import EmbeddedInput
from jaxis.vision.processors.processor import PixelScale

REQUEST_BYTES = 64 * 2**20
"""Size of a request with images, in bytes; one file of the largest size in base64 takes two thirds of it."""
_CACHE_BYTES = 256 * 2**20  # of images that no request has any more
_SMALLEST_PADDED = 64
# Of a slice of the tower: tens of milliseconds of a few processor cores, and some of an accelerator.
_CPU_SLICE_FLOPS = 2e9
_SLICE_FLOPS = 1e12


@dataclass
class _Encoding:
    """An image that is being encoded.

    Attributes:
      item: The image.
      program: Program of each view.
      values: Values of the view's program that later slices take; devices may still compute them.
      num_slices: Number of dispatched slices of the view's program.
      newest: Results of the newest slice.
      rows: Embeddings of the views before that.
    """

    item: EmbeddedInput
    program: SlicedProgram
    values: dict[int, Any]
    num_slices: int = 0
    newest: Sequence[Any] = ()
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def is_view_done(self) -> bool:
        """True if all of the view's slices were dispatched."""
        return self.num_slices == len(self.program.slices)


class ImageEncoder:
    """The `InputEncoder` of images: each is encoded once while a request with it runs, and for a while after.

    Every view of an image is encoded alone, so that its embeddings depend on nothing else. The host keeps them: steps
    take the rows that they need.

    Attributes:
      num_encoded: Number of images that were encoded.

    Args:
      tower: The loaded tower.
      pixel_scale: Scale of the processor's pixels.
      max_inputs: Limits as in `InputEncoder`.
      context: Context of the text model's programs.
      files: Folder or file that the processor is read from.
    """

    request_bytes = REQUEST_BYTES

    def __init__(
        self,
        tower: VisionTower,
        pixel_scale: PixelScale,
        max_inputs: Mapping[str, int],
        context: ProgramContext,
        files: Path,
    ) -> None:
        self.max_inputs, self.files, self.num_encoded = max_inputs, files, 0
        self._scale, self._dtype = pixel_scale, context.model.hidden_states.dtype
        self.patch_size, self.merge_size, self._ends_lines = tower.patch_size, tower.merge_size, tower.ends_lines
        self._outside = tower.outside
        # Of an image's pixels, and of those of a video's frames together.
        self._channels = {3, 3 * tower.num_frames} if tower.outside is None else {4}
        self.embedding_size = context.model.hidden_states.shape[-1] * (1 + tower.num_additions)
        self._context = context
        self._programs: dict[tuple[int, int], SlicedProgram] = {}  # by patches of a view, and channels
        self._graphdef, state = nnx.split(tower)
        self.arrays, self._treedef = jax.tree.flatten(state)
        self._uses: Counter[bytes] = Counter()  # of sequences, by digest
        self._held: dict[bytes, np.ndarray] = {}  # by digest: embeddings of images that sequences have
        self._unused: OrderedDict[bytes, np.ndarray] = OrderedDict()  # the others, least recently used first
        self._unused_bytes = 0
        self._begun: _Encoding | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tower on all devices together."""
        return bytes_on_devices(self.arrays)

    def check(self, item: EmbeddedInput) -> None:
        side = self.patch_size * self.merge_size
        is_image = len(item.shape) == 4 and item.shape[3] in self._channels and len(item.data) == math.prod(item.shape)
        if not is_image or min(item.shape) < 1 or item.shape[1] % side or item.shape[2] % side:
            raise RequestError(f"an image of shape {list(item.shape)} is not one that the model's processor makes")
        num_made = math.prod(item.shape[:3]) // side**2
        order = range(num_made) if item.order is None else item.order
        fits = len(order) == len(item.rows)
        if item.weights is not None and item.order is not None and item.rows:
            fits = len(item.weights) == len(order) and len(order) % len(item.rows) == 0
        if not fits or not all(-self._ends_lines <= i < num_made for i in order):
            raise RequestError("an image has another number of embeddings than there are tokens for it")

    def begin(self) -> None:
        self._uses.clear()
        self._begun = None
        for digest in list(self._held):
            self._keep(digest, self._held.pop(digest))

    def hold(self, inputs: Iterable[EmbeddedInput]) -> None:
        for item in inputs:
            self._uses[item.digest] += 1
            if (rows := self._unused.pop(item.digest, None)) is not None:
                self._unused_bytes -= rows.nbytes
                self._held[item.digest] = rows

    def let_go(self, inputs: Iterable[EmbeddedInput]) -> None:
        for item in inputs:
            self._uses[item.digest] -= 1
            if not self._uses[item.digest]:
                del self._uses[item.digest]
                if (rows := self._held.pop(item.digest, None)) is not None:
                    self._keep(item.digest, rows)

    def is_ready(self, item: EmbeddedInput) -> bool:
        return item.digest in self._held

    def go_on(self, awaited: Sequence[EmbeddedInput], programs: Programs) -> None:
        """Encodes one image at a time, one view after the other."""
        begun = self._begun
        if begun is not None and begun.item.digest not in self._uses:
            begun = None  # its request was aborted
        if begun is None:
            begun = self._begun = self._encoding(awaited[0])
        elif not all(array.is_ready() for array in begun.newest):
            return
        self._run_slice(begun, programs)

    def wait(self) -> None:
        if self._begun is not None:
            jax.block_until_ready(self._begun.newest)

    def rows(self, item: EmbeddedInput, programs: Programs) -> np.ndarray:
        while item.digest not in self._held:
            if self._begun is None:
                self._begun = self._encoding(item)
            self._run_slice(self._begun, programs)
        return self._held[item.digest]

    def _encoding(self, item: EmbeddedInput) -> _Encoding:
        program = self._program(_padded(self._num_patches(item), self.merge_size), item.shape[3])
        return _Encoding(item, program, self._values(item, 0, program))

    def _values(self, item: EmbeddedInput, index: int, program: SlicedProgram) -> dict[int, Any]:
        """Returns the values with which the program of a view begins."""
        view = np.frombuffer(item.data, np.uint8).reshape(item.shape)[index]
        num_padded = _padded(self._num_patches(item), self.merge_size)
        packed = pack_patches(view, self.patch_size, self.merge_size, num_padded)
        return program.constants | dict(zip(program.inputs, (*self.arrays, packed), strict=True))

    def _program(self, num_padded: int, num_channels: int) -> SlicedProgram:
        """The tower over views of at most so many patches."""
        if (num_padded, num_channels) not in self._programs:
            context = self._context
            structs = [
                *(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in self.arrays),
                context.int32(packed_size(num_padded, self.patch_size, num_channels)),
            ]

            def encode(*operands: jax.Array) -> jax.Array:
                *arrays, packed = operands
                return self.encode(arrays, packed, num_padded, num_channels)

            with jax.set_mesh(context.mesh):
                program = cut(encode, structs, _slice_flops(), context.replicated)
                self._programs[num_padded, num_channels] = program
        return self._programs[num_padded, num_channels]

    def _run_slice(self, begun: _Encoding, programs: Programs) -> None:
        """Dispatches the next slice, and takes in a view after its last one."""
        if not begun.is_view_done:
            for program in begun.program.programs if not begun.num_slices else ():
                programs.precompile(SliceKey(program))
            part = begun.program.slices[begun.num_slices]
            begun.newest = programs.run(SliceKey(part.program), [begun.values[value] for value in part.inputs])
            for value in part.last_used:
                del begun.values[value]
            begun.values |= zip(part.outputs, begun.newest, strict=True)
            begun.num_slices += 1
            return
        encoded = np.asarray(begun.values[begun.program.output], np.float32)
        begun.rows.append(encoded[: self._num_patches(begun.item) // self.merge_size**2])
        if len(begun.rows) < begun.item.shape[0]:
            begun.values, begun.num_slices = self._values(begun.item, len(begun.rows), begun.program), 0
            return
        self.num_encoded += 1
        self._begun, digest, order = None, begun.item.digest, begun.item.order
        rows = np.concatenate(begun.rows if order is None else [*begun.rows, encoded[-1:]])
        if order is not None:
            rows = _in_order(rows, order, begun.item.weights, len(begun.item.rows))
        if digest in self._uses:
            self._held[digest] = rows
        else:
            self._keep(digest, rows)

    def _num_patches(self, item: EmbeddedInput) -> int:
        """Returns the number of patches of each view."""
        return item.shape[1] * item.shape[2] // self.patch_size**2

    def _keep(self, digest: bytes, rows: np.ndarray) -> None:
        """Keeps what no sequence holds any more, while there is room."""
        self._unused[digest] = rows
        self._unused_bytes += rows.nbytes
        while self._unused_bytes > _CACHE_BYTES:
            self._unused_bytes -= self._unused.popitem(last=False)[1].nbytes

    def encode(self, arrays: list[jax.Array], packed: jax.Array, num_padded: int, num_channels: int) -> jax.Array:
        """The tower over a packed view, when jitted: float32 [num_padded / merge_size ** 2, embedding_size]."""
        patches = unpack_patches(packed, self.patch_size, num_padded, num_channels)
        by_channel = patches.pixels.reshape(num_padded, -1, 3 if self._outside is None else 4).astype(jnp.float32)
        if self._outside is not None:
            by_channel = jnp.where(by_channel[..., 3:] > 0, by_channel[..., :3], jnp.float32(self._outside))
        mean, std = (jnp.asarray(each, jnp.float32) for each in (self._scale.mean, self._scale.std))
        scaled = (by_channel * jnp.float32(self._scale.factor) - mean) / std
        tower: Any = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, arrays))
        rows = tower(patches._replace(pixels=scaled.reshape(num_padded, -1).astype(self._dtype)))
        return rows.astype(jnp.float32)


@dataclass(frozen=True)
class SliceKey:
    """A slice of the tower over one view."""

    slice_program: SliceProgram

    runs_on = RunsOn.LAST_STAGE
    num_tokens = 0

    @property
    def result_tree(self) -> list[int]:
        return [0] * self.slice_program.num_outputs

    @property
    def description(self) -> str:
        return "the vision tower"

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        program = self.slice_program
        return jit(program.function, out_shardings=context.replicated).lower(*program.structs)

    def run(self, program: Compiled, state: DeviceState, values: Sequence[Any]) -> list[jax.Array]:
        """Runs the slice; `values` are those of its inputs."""
        del state
        return program(*values)


def _in_order(made: np.ndarray, order: Sequence[int], weights: Sequence[float] | None, num_rows: int) -> np.ndarray:
    """The rows that take these of the embeddings [N, E] that were made: float32 [num_rows, E]."""
    if weights is None:
        return made[list(order)]
    taken = np.asarray(order, np.int32).reshape(num_rows, -1).T
    shares = np.asarray(weights, np.float32).reshape(num_rows, -1).T
    total = made[taken[0]] * shares[0][:, None]
    for which, share in zip(taken[1:], shares[1:], strict=True):
        total += made[which] * share[:, None]
    return total


def _slice_flops() -> float:
    return _CPU_SLICE_FLOPS if target_platform() == "cpu" else _SLICE_FLOPS


def _padded(num_patches: int, merge_size: int) -> int:
    """A power of two of merged patches, or 1.5 times one: programs for few numbers of patches."""
    num_merged, size = num_patches // merge_size**2, merge_size**2
    power = max(1 << (num_merged - 1).bit_length(), -(-_SMALLEST_PADDED // size))
    return (power * 3 // 4 if power * size > _SMALLEST_PADDED and num_merged <= power * 3 // 4 else power) * size
