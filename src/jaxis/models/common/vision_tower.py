"""Interface of a family's vision tower, and the packed vector that passes a view of an image to its program."""

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
    """P patches of a view of an image, with padding.

    Attributes:
      pixels: [P, patch * patch * 3 * frames], row by row and channels last, frame after frame. uint8 on the host; in
        the tower, values that the processor computed from them.
      rows, columns: i32 [P], row and column of each patch.
      num_patches: i32, number of patches without the padding.
    """

    pixels: jax.Array
    rows: jax.Array
    columns: jax.Array
    num_patches: jax.Array


class VisionTower(JaxModule, LoadableWithIterator):
    """Computes embeddings of the text model from a view of an image.

    Its parameters are the checkpoint's besides those of the text. The constructor takes `vllm_config`, whose
    config.json has the keys of the text too, and `rng` for initial weights. It raises a `ConfigError` for settings that
    are not supported.

    Attributes:
      prefixes: Name prefixes of the tower's tensors.
      unused: Name prefixes of tensors among them that do not affect embeddings and are skipped.
      names: Renames from checkpoint names to parameter names. They apply before `prefixes` and `unused`, which
        therefore have parameter names.
      patch_size: Pixels of a side of a patch.
      merge_size: Patches of a side of the square that becomes one embedding.
      num_frames: Frames of a view of a video; 1 for a tower of images only.
      num_additions: Number of the text's first layers that receive additions at an image's tokens (DeepStack,
        arXiv:2406.04334). The additions follow the embeddings.
      ends_lines: True if an embedding of the end of a line of patches follows all others.
    """

    prefixes: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[CheckpointNames] = CheckpointNames()
    patch_size: int
    merge_size: int
    num_frames: int = 1
    num_additions: int = 0
    ends_lines: ClassVar[bool] = False

    def __call__(self, patches: Patches) -> jax.Array:
        """Returns embeddings [P / merge_size ** 2, E * (1 + num_additions)] of merged patches in order, padding last.

        With `ends_lines`, one more row follows.
        """
        raise NotImplementedError

    @classmethod
    def has_tensor(cls, name: str) -> bool:
        """True if a checkpoint's tensor of this name is the tower's."""
        name = cls._plain_name(name)
        return name.startswith(cls.prefixes) and not name.startswith(cls.unused)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Fills the tower's parameters; ignores other tensors."""
        return super().load_weights((self._plain_name(name), each) for name, each in weights if self.has_tensor(name))

    @classmethod
    def _plain_name(cls, name: str) -> str:
        # transformers' names; files have the text and the tower on one level.
        return cls.names.name_here(name.removeprefix("model."))


def pack_patches(pixels: np.ndarray, patch_size: int, merge_size: int, num_padded: int) -> np.ndarray:
    """Packs a view of an image, uint8 [height, width, 3 * frames], into one int32 vector, for `unpack_patches`.

    Patches to be merged are adjacent, so that merging is a reshape. The sides are multiples of
    `patch_size * merge_size`, and `num_padded` P is one of `merge_size ** 2`.
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
    """Returns the length of `pack_patches`' result."""
    return 1 + 2 * num_padded + -(-num_padded * patch_size * patch_size * num_channels // 4)


def unpack_patches(packed: jax.Array, patch_size: int, num_padded: int, num_channels: int) -> Patches:
    """Unpacks the patches of a view, with uint8 pixels, inside a jitted function."""
    size = patch_size * patch_size * num_channels
    data = jax.lax.bitcast_convert_type(packed[1 + 2 * num_padded :], jnp.uint8).reshape(-1)
    places = packed[1 : 1 + 2 * num_padded].reshape(2, num_padded)
    return Patches(data[: num_padded * size].reshape(num_padded, size), places[0], places[1], packed[0])
