"""What a family's vision tower is to the engine, and how an image's view lies in the vector that its program takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.module import JaxModule
from jaxis.models.common.interfaces import LoadableWithIterator


class Patches(NamedTuple):
    """A view of an image as a tower takes it, its P patches padded.

    Attributes:
      pixels: Of each patch, [P, patch * patch * 3], row by row and channels last, those of one frame after another's
        where a view has several; uint8 on the host, and what the processor makes of them in the tower.
      rows, columns: Where the patch lies, i32 [P].
      num_patches: Without the padding, i32.
    """

    pixels: jax.Array
    rows: jax.Array
    columns: jax.Array
    num_patches: jax.Array


class VisionTower(JaxModule, LoadableWithIterator):
    """From a view of an image to embeddings of the text model.

    Its parameters are the checkpoint's beside those of its text.

    A family's constructor takes `vllm_config`, whose config.json is what `config_keys` name, and `rng`.

    Attributes:
      config_keys: What of config.json is about it; a key of a nested object is written with dots.
      prefixes: How the names of its tensors begin in the checkpoint.
      unused: How the names of those among them begin that embeddings do not depend on.
      names: What they are called in files, below what `prefixes` and `unused` say with the names here.
      patch_size: Pixels of a side of a patch.
      merge_size: Patches of a side of what becomes one embedding.
      num_frames: Frames that a view of a video has; 1: the tower takes images alone.
      num_additions: After how many of the text's first layers something is added at an image's tokens (DeepStack,
        arXiv:2406.04334); it follows the embeddings.
      ends_lines: Whether there is an embedding for the end of a line of patches, which then follows all others.
    """

    config_keys: ClassVar[tuple[str, ...]]
    prefixes: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[CheckpointNames] = CheckpointNames()
    patch_size: int
    merge_size: int
    num_frames: int = 1
    num_additions: int = 0
    ends_lines: ClassVar[bool] = False

    def __call__(self, patches: Patches) -> jax.Array:
        """Embeddings [P / merge_size ** 2, E * (1 + num_additions)], in the order of merged patches, padding last.

        With `ends_lines`, one row more.
        """
        raise NotImplementedError

    @classmethod
    def has_tensor(cls, name: str) -> bool:
        """Whether a tensor of this name in a checkpoint is the tower's."""
        name = cls._plain_name(name)
        return name.startswith(cls.prefixes) and not name.startswith(cls.unused)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """See `LoadableWithIterator`; tensors that are not the tower's are left alone."""
        return super().load_weights((self._plain_name(name), each) for name, each in weights if self.has_tensor(name))

    @classmethod
    def _plain_name(cls, name: str) -> str:
        # As transformers names them; in files the text and the tower are on one level.
        return cls.names.name_here(name.removeprefix("model."))


def pack_patches(pixels: np.ndarray, patch_size: int, merge_size: int, num_padded: int) -> np.ndarray:
    """A view of an image as one int32 vector, for `unpack_patches`.

    Patches that are merged follow each other, so that merging is a reshape.

    Args:
      pixels: uint8 [height, width, 3 * frames], sides multiples of `patch_size * merge_size`.
      patch_size: The tower's.
      merge_size: The tower's.
      num_padded: P, a multiple of `merge_size ** 2`.
    """
    height, width, channels = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    groups = rows // merge_size, merge_size, columns // merge_size, merge_size
    in_patches = pixels.reshape(groups[0], merge_size, patch_size, groups[2], merge_size, patch_size, channels)
    in_patches = in_patches.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"))
    grid = grid.reshape(2, *groups).transpose(0, 1, 3, 2, 4).reshape(2, -1)
    num_patches = rows * columns
    places = np.zeros((2, num_padded), np.int32)
    places[:, :num_patches] = grid
    data = np.zeros(-(-num_padded * in_patches.shape[1] // 4) * 4, np.uint8)
    data[: in_patches.size] = in_patches.ravel()
    return np.concatenate([np.asarray([num_patches], np.int32), places.ravel(), data.view(np.int32)])


def packed_size(num_padded: int, patch_size: int, num_channels: int) -> int:
    """The length of what `pack_patches` returns."""
    return 1 + 2 * num_padded + -(-num_padded * patch_size * patch_size * num_channels // 4)


def unpack_patches(packed: jax.Array, patch_size: int, num_padded: int, num_channels: int) -> Patches:
    """The patches of a view, inside a jitted function; their pixels are uint8."""
    size = patch_size * patch_size * num_channels
    data = jax.lax.bitcast_convert_type(packed[1 + 2 * num_padded :], jnp.uint8).reshape(-1)
    places = packed[1 : 1 + 2 * num_padded].reshape(2, num_padded)
    return Patches(data[: num_padded * size].reshape(num_padded, size), places[0], places[1], packed[0])
