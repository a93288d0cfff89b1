"""Image encoders of Inkling, which folds each patch to one vector by products, and of Inkling 2, a transformer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.internvit import FeatureScale
from jaxis.models.common.towers.options import VisionOptions, converted, of_vision
from jaxis.models.common.towers.patches import Patches
from jaxis.models.common.towers.positions import AxialRope, Positions, rotate_pairs, stretched_positions
from jaxis.models.common.towers.projector import Projection
from jaxis.models.common.towers.tower import VisionTower
from jaxis.models.common.towers.transformer import patch_product

_EPSILON = 1e-6  # of the reference's norms, whatever the config says
_CLASS, _CLASS_POSITION = "tower.class_token", "tower.class_position"


class PatchFolds(JaxModule):
    """Products over squares of a patch's pixels that grow to all of it, then over its frames, which are equal.

    There are norms and activations between them.
    """

    def __init__(self, scope: LayerScope, options: VisionOptions) -> None:
        plan = fold_plan(options.num_frames, options.patch_size, options.num_layers)
        self.folds: list[tuple[int, int]] = []  # of each product: frames, and pixels of a side, that become one
        self.side, self.act = options.patch_size, activation_function("gelu")
        for i, ((frames, side, size), (next_frames, next_side, next_size)) in enumerate(itertools.pairwise(plan)):
            fold = next_frames // frames, next_side // side
            self.folds.append(fold)
            is_last = i == options.num_layers - 1
            inputs, outputs = size * fold[0] * fold[1] ** 2, options.hidden_size if is_last else next_size
            setattr(self, f"linear_{i}", linear(scope / f"linear_{i}", inputs, outputs, axes=(None, None)))
            if not is_last:
                setattr(self, f"norm_{i}", rms_norm(scope, outputs, epsilon=_EPSILON))

    def __call__(self, patches: Patches) -> list[jax.Array]:
        """Patches -> one state [P, E]."""
        num_patches, side = patches.pixels.shape[0], self.side
        x = patches.pixels.reshape(num_patches, side, side, -1)
        for i, (frames, fold) in enumerate(self.folds):
            side //= fold
            x = x.reshape(num_patches, side, fold, side, fold, -1).swapaxes(2, 3)
            x = jnp.tile(x.reshape(num_patches * side * side, -1), frames)
            x = getattr(self, f"linear_{i}")(x)
            if i < len(self.folds) - 1:
                x = self.act(getattr(self, f"norm_{i}")(x))
        return [x.reshape(num_patches, -1)]


def fold_plan(num_frames: int, patch_size: int, num_layers: int) -> list[tuple[int, int, int]]:
    """Returns (frames, pixels of a side, features) that are one vector before each product, and after the last.

    As the reference's `plan_out_scales`: the products shrink a patch by about equal factors.
    """
    sides = np.cumprod(_prime_factors(patch_size))
    frames = np.cumprod(_prime_factors(num_frames))
    scales = [(1, 1, 3), *((1, int(side), -(-(int(side) ** 2) * 3 // 64) * 64) for side in sides)]
    scales += [(int(count), patch_size, patch_size**2 * 3 * int(count) * 64) for count in frames]
    reduced = np.log(np.asarray([count * side**2 for count, side, _ in scales], np.float32))
    ideal = np.linspace(0, np.log(np.float32(patch_size**2 * num_frames * 3)), num_layers + 1, dtype=np.float32)
    costs = np.abs(ideal[:, None] - reduced)
    if num_layers >= len(scales):
        chosen = costs.argmin(axis=1)
    else:
        from scipy.optimize import linear_sum_assignment  # of JAX's own needs; slow to import

        chosen = linear_sum_assignment(costs)[1]
    return [scales[0], *(scales[i] for i in chosen[1:-1]), scales[-1]]


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number, the largest first."""
    factor = next((each for each in range(2, math.isqrt(number) + 1) if number % each == 0), number)
    return [] if number == 1 else [*_prime_factors(number // factor), factor]


class InklingVision(VisionTower):
    names = CheckpointNames((("visual.layers", "tower"), ("visual.final_norm", "projector")))
    vision = VisionOptions(
        of_vision("text_hidden_size", of_vision("decoder_dmodel", 6144)),
        0,
        of_vision("n_layers", of_vision("num_hidden_layers", 24)),
        16,
        40,
        "gelu",
        num_frames=of_vision("temporal_patch_size", 2),
        expected={
            **{"model_type": ("inkling_vision",), "vision_encoder_type": ("hmlp",)},
            **{"use_vision_norm": (True,), "n_channels": (3,)},
        },
        ignored=dict.fromkeys(("hidden_size", "rms_norm_eps"), "the reference has no such size"),
    )
    tower_class = PatchFolds
    outside = -1.0

    @staticmethod
    def make_projector(scope: LayerScope, options: VisionOptions) -> JaxModule:
        return rms_norm(scope, options.hidden_size, epsilon=_EPSILON)


class Inkling2Vision(VisionTower):
    names = CheckpointNames(
        (
            *(("visual.proj_in", "projector.linear_1"), ("visual.proj_out", "projector.linear_2")),
            *(("visual.backbone", "tower"), ("tower.embeddings.patch_embedding", "tower.patch_embed")),
            ("tower.embeddings.position_embedding", "tower.position_embed.weight"),
            *(("tower.embeddings.class_embedding", _CLASS), ("tower.ln_pre", "tower.pre_norm")),
            ("tower.embeddings.cls_position_embedding", _CLASS_POSITION),
            *(("ln_1", "norm1"), ("ln_2", "norm2"), ("self_attn", "attn"), ("attn.out_proj", "attn.o_proj")),
            *(("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2")),
            *(("ls_1.gamma", "after_attn.weight"), ("ls_2.gamma", "after_mlp.weight")),
        )
    )
    vision = VisionOptions(
        *(1024, 4096, 23, 16, 20, "gelu"),
        merge_size=of_vision("spatial_merge_size", 2),
        epsilon=of_vision("layer_norm_eps", 1e-5),
        embed_patches=patch_product,
        positions=Positions(stretched_positions, (converted(of_vision("posemb_grid_size", 32), lambda side: side**2),)),
        class_shape=(),
        norms=("pre_norm",),
        rope=AxialRope(theta=10_000.0, rotate=rotate_pairs, columns_first=True, first=1),
        make_after=FeatureScale,
        expected={"model_type": ("inkling2_vision",)},
        ignored=dict.fromkeys(
            ("layer_scale_init_value", "mlp_ratio", "text_hidden_size"), "other keys or the checkpoint say the same"
        ),
    )
    make_projector = Projection(
        inner_sizes=(of_vision("projection_hidden_dim", 4096),),
        activation=of_vision("hidden_act", "gelu"),
        use_bias=of_vision("projector_bias", False),
    )
    outside = -1.0

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        """Loads the sum of the class token and its position, which the reference adds, as the token."""
        return super().load_weights(self._with_whole_class(weights))

    def _with_whole_class(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        parts: list[np.ndarray] = []
        for name, tensor in weights:
            if self._plain_name(name) not in (_CLASS, _CLASS_POSITION):
                yield name, tensor
            elif parts:
                yield _CLASS, parts[0] + tensor
            else:
                parts.append(tensor)
