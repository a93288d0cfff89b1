"""The vision tower beside the text model: its room on the devices, and the images that it has encoded."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.hf_config import HFConfig
from jaxis.engine.embedded_inputs.feature import EmbeddedInputs
from jaxis.engine.execution.device_state import DeviceState
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.extra_memory import ExtraMemory, LeftOut, NoMemory
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.model_arrays import bytes_on_devices
from jaxis.engine.execution.program_context import ProgramContext, jit
from jaxis.engine.execution.program_key import Compiled, RunsOn
from jaxis.engine.execution.programs import Programs
from jaxis.errors import RequestError
from jaxis.host.byte_size import human_bytes
from jaxis.host.extras import missing_module
from jaxis.kernels.platform import target_platform
from jaxis.layers.module import JaxModule
from jaxis.layers.weight_bytes import weight_bytes
from jaxis.models.common.vision_tower import VisionTower, pack_patches, packed_size, unpack_patches
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.prompts import EmbeddedInput
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import Dequantize, PackingConfig
from jaxis.tokenizer import Tokenizer
from jaxis.vision.processors import read_processor
from jaxis.vision.processors.preprocessor_config import ProcessorSettings
from jaxis.vision.processors.processor import ImageProcessor, PixelScale
from jaxis.vision.slices import SlicedProgram, SliceProgram, cut
from jaxis.vision.tower_source import MmprojTensors, TowerSource, tower_source

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig
    from jaxis.engine.arguments import EngineArgs

MAX_INPUTS = {"image": 32, "video": 32}
"""Default limits of a prompt's inputs, by kind."""
REQUEST_BYTES = 64 * 2**20
"""Size of a request with images, in bytes; one file of the largest size in base64 takes two thirds of it."""
_CHOSEN = LeftOut("limit_mm_per_prompt allows no images: raise --limit-mm-per-prompt, or send text", is_chosen=True)
_CACHE_BYTES = 256 * 2**20  # of images that no request has any more
_SMALLEST_PADDED = 64
# Of a slice of the tower: tens of milliseconds of a few processor cores, and some of an accelerator.
_CPU_SLICE_FLOPS = 2e9
_SLICE_FLOPS = 1e12


class EncoderMemory(ExtraMemory):
    """Device memory for the weights of a vision tower.

    `max_inputs` is that of `InputEncoder`. `quant_config` stores and applies the tower's weights; None keeps them as
    they are.
    """

    text = 'the weights of the vision tower (--limit-mm-per-prompt \'{"image": 0, "video": 0}\' leaves it out)'

    def __init__(
        self,
        config: VllmConfig,
        source: TowerSource,
        pixel_scale: PixelScale,
        max_inputs: Mapping[str, int],
        quant_config: QuantizationConfig | None,
    ) -> None:
        self._config, self._source = _config_of_tower(config, source.tower_class, source.config, quant_config), source
        self._pixel_scale, self._max_inputs = pixel_scale, max_inputs

    def bytes_beside(self, model: JaxModule, dtype: DTypeLike) -> int:
        del model
        tower = construct_abstractly(self._config, check_config=False, model_class=self._source.tower_class)
        # As if each device had all of it.
        return weight_bytes(tower, np.dtype(dtype).itemsize)

    def fill(self, executor: Executor, note: Callable[[str], None]) -> list[RequestFeature]:
        [stage] = executor.stages  # `make_memory` gives others none
        source = self._source
        tensors = None if source.mmproj is None else MmprojTensors(source.mmproj)
        loaded = load_model(self._config, stage.context.mesh, model_class=source.tower_class, tensors=tensors)
        tower = cast(VisionTower, loaded)
        encoder = ImageEncoder(tower, self._pixel_scale, self._max_inputs, stage.context, source.files)
        note(f"images: {human_bytes(encoder.num_bytes)} for the vision tower; see docs/images.md")
        return [EmbeddedInputs(encoder, self._config.scheduler_config.max_num_batched_tokens)]


def make_memory(
    args: EngineArgs,
    path: Path,
    hf_config: HFConfig,
    tokenizer: Tokenizer | None,
    make_config: Callable[[EngineArgs], VllmConfig],
) -> ExtraMemory:
    """Returns the memory for a checkpoint's vision tower, or the reason for which the tower is left out.

    Args:
      args: The engine's.
      path: The checkpoint's folder, or its GGUF file.
      hf_config: The checkpoint's.
      tokenizer: The checkpoint's.
      make_config: Makes the engine's configuration; reading its keys is not reading them for the model.

    Raises:
      ConfigError: The tower or the processor asks for something that is not supported.
      CheckpointError: `tower_source` fails.
    """
    limits = MAX_INPUTS | dict(args.limit_mm_per_prompt or {})
    if not any(limits.values()):
        return NoMemory(_CHOSEN)
    mmproj = None if args.mmproj is None else Path(args.mmproj)
    source = tower_source(path, hf_config, mmproj, is_made_up=args.load_format == "dummy")
    if isinstance(source, LeftOut):
        return NoMemory(source)
    if reason := _why_not_here(args):
        return NoMemory(LeftOut(reason, is_chosen=False))
    processor = read_processor(source.files, tokenizer)
    if processor is None:
        return NoMemory(LeftOut(_why_no_processor(source.files, tokenizer), is_chosen=False))
    if processor.video is None:
        del limits["video"]
    if not any(limits.values()):
        return NoMemory(_CHOSEN)
    config = make_config(args)
    if processor.is_bidirectional and (reason := _why_not_bidirectional(config, processor)):
        return NoMemory(LeftOut(reason, is_chosen=False))
    return EncoderMemory(config, source, processor.pixel_scale, limits, _quantization(args, config))


def _quantization(args: EngineArgs, config: VllmConfig) -> QuantizationConfig | None:
    """Returns the quantization of the tower's weights, which are packed where the text's are."""
    choice = parse_quantization(args.vision_quantization)
    assert not isinstance(choice, Dequantize)
    return PackingConfig(choice) if isinstance(config.quant_config, PackingConfig) else choice


def _why_not_here(args: EngineArgs) -> str | None:
    """Returns the reason for which no tower runs with these arguments on this machine; None if one does."""
    for name in ("pipeline_parallel_size", "nnodes"):
        if (number := getattr(args, name)) > 1:
            return f"images do not combine with {name}={number}: leave out --{name.replace('_', '-')}"
    return None if missing_module("vision") is None else "images need Pillow: pip install 'jaxis[vision]'"


def _why_no_processor(files: Path, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "images need a tokenizer, and the model has none"
    names = ProcessorSettings(files).names
    if not names:
        return "images need a preprocessor_config.json, and the checkpoint has none: add that of the model"
    return f"images need an image processor that jaxis knows, and the checkpoint's is {names[0]}"


def _why_not_bidirectional(config: VllmConfig, processor: ImageProcessor) -> str | None:
    """Returns the reason for which images whose tokens see each other cannot be served; None if they can."""
    if jax.default_backend() == "tpu":
        return "images whose tokens see later ones have no kernel for TPUs"
    # Beside a token of every other sequence.
    needed = processor.most_tokens + config.scheduler_config.max_num_seqs - 1
    if (most := config.scheduler_config.max_num_batched_tokens) < needed:
        return f"images need max_num_batched_tokens >= {needed} (it is {most}): raise --max-num-batched-tokens"
    return None


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
        self._channels = {3, 3 * tower.num_frames}  # of an image's pixels, and of those of a video's frames together
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
        by_channel = patches.pixels.reshape(num_padded, -1, 3).astype(jnp.float32)
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


def _config_of_tower(
    config: VllmConfig, tower_class: type[VisionTower], hf_config: HFConfig, quant_config: QuantizationConfig | None
) -> VllmConfig:
    """The engine's configuration with the keys of config.json that are about the tower, none of which may be unread."""
    values, chosen = hf_config.to_dict(), {}
    for dotted in tower_class.config_keys:
        *parents, key = dotted.split(".")
        source, target = values, chosen
        for parent in parents:
            source, target = source.get(parent) or {}, target.setdefault(parent, {})
        if key in source:
            target[key] = source[key]
    chosen_config = HFConfig(chosen, source=hf_config.source)
    model_config = dataclasses.replace(config.model_config, hf_config=chosen_config)
    load_config = dataclasses.replace(config.load_config, tensor_changes=None, prediction_layer=False)
    return dataclasses.replace(
        config, model_config=model_config, load_config=load_config, quant_config=quant_config, speculative_config=None
    )
