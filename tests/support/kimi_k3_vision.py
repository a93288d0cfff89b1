"""Kimi K3's images in torch, which transformers lacks, written from the equations of the maker's files.

Tensors have the names of the published files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn
from torch.nn import functional

from tests.support.kimi_k3_reference import KimiK3Reference

SETTINGS = {
    **{"in_patch_limit": 60, "patch_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    **{"merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 12},
    "transparent_bg_config": {
        **{"pattern": "chessboard", "chessboard_square_size": 5, "chessboard_square_on_top_left": True},
        **{"chessboard_white_value": 255, "chessboard_gray_value": 180},
    },
    "transparent_bg_fill_stage": "after_resize",
}
"""Published settings, with other sizes."""


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class Block(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        size, inner, self.heads = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_num_attention_heads"]
        self.norm0, self.norm1 = nn.RMSNorm(size), nn.RMSNorm(size)
        self.wqkv, self.wo = _linear(size, 3 * inner), _linear(inner, size)
        self.mlp = nn.ModuleDict(
            {"fc0": _linear(size, vision["vt_intermediate_size"]), "fc1": _linear(vision["vt_intermediate_size"], size)}
        )

    def forward(self, x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """x [P, C] of one image, cis complex [P, D / 2]."""
        q, k, v = self.wqkv(self.norm0(x)).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.reshape(*each.shape[:2], -1, 2)) * cis[:, None]).flatten(2)
            for each in (q, k)
        )
        scores = torch.einsum("phd,qhd->hpq", q, k) / math.sqrt(q.shape[-1])
        x = x + self.wo(torch.einsum("hpq,qhd->phd", scores.softmax(-1), v).flatten(1))
        hidden = functional.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh")
        return x + self.mlp["fc1"](hidden)


class Tower(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        size, patch = vision["vt_hidden_size"], vision["patch_size"]
        self.head_dim = vision["qkv_hidden_size"] // vision["vt_num_attention_heads"]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, size, patch, patch, bias=False)
        self.patch_embed.pos_emb = nn.Module()
        places = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
        self.patch_embed.pos_emb.weight = nn.Parameter(torch.zeros(*places, size))
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(Block(vision) for _ in range(vision["vt_num_hidden_layers"]))
        self.encoder.final_layernorm = nn.RMSNorm(size)

    def forward(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Patches [P, 3, side, side] of one image, row by row -> [P / 4, 4 C]."""
        table = self.patch_embed.pos_emb.weight.permute(2, 0, 1)[None]
        table = functional.interpolate(table, size=(rows, columns), mode="bilinear")[0]
        x = self.patch_embed.proj(patches).flatten(1) + table.permute(1, 2, 0).flatten(0, 1)
        frequencies = 10_000.0 ** -(torch.arange(0, self.head_dim, 4).float() / self.head_dim)
        y, across = torch.meshgrid(torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij")
        angles = torch.stack([each.flatten()[:, None] * frequencies for each in (across, y)], -1).flatten(1)
        for block in self.encoder.blocks:
            x = block(x, torch.polar(torch.ones_like(angles), angles))
        x = self.encoder.final_layernorm(x).view(rows // 2, 2, columns // 2, 2, -1)
        return x.transpose(1, 2).reshape(rows * columns // 4, -1)


class Projector(nn.Module):
    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        joined, size = 4 * vision["mm_hidden_size"], vision["text_hidden_size"]
        self.proj = nn.Sequential(_linear(joined, joined), nn.GELU(), _linear(joined, size))
        self.post_norm = nn.RMSNorm(size, eps=vision["projector_ln_eps"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.post_norm(self.proj(x))


class KimiK3VisionReference(nn.Module):
    """A model with images.

    Args:
      text: Config of the text.
      vision: The published `vision_config`.
    """

    def __init__(self, text: transformers.PretrainedConfig, vision: Mapping[str, Any]) -> None:
        super().__init__()
        self.language_model = KimiK3Reference(text)
        self.vision_tower, self.mm_projector = Tower(vision), Projector(vision)

    def features(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> list[torch.Tensor]:
        """Embeddings of each image, from the patches of all."""
        sizes = [rows * columns for _, rows, columns in image_grid_thw.tolist()]
        parts = zip(pixel_values.split(sizes), image_grid_thw.tolist(), strict=True)
        return [self.mm_projector(self.vision_tower(patches, *grid[1:])) for patches, grid in parts]

    def logits(self, tokens: torch.Tensor, pad: int, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tokens [1, T] with images' at the token `pad` -> [1, T, V]."""
        table = self.language_model.model.embed_tokens
        embeds = table(tokens[0])
        embeds[tokens[0] == pad] = torch.cat(list(features))
        hook = table.register_forward_hook(lambda *_: embeds)
        logits = self.language_model(tokens).logits
        hook.remove()
        return logits


def upright_pixels(image: Image.Image, settings: Mapping[str, Any] = SETTINGS) -> np.ndarray:
    """An image as the tower sees it: resized, on a chessboard, and black at the right and below; [height, width, 3]."""
    patch, most, limit = (settings[key] for key in ("patch_size", "in_patch_limit", "patch_limit_on_one_side"))
    count = max(1, image.width // patch) * max(1, image.height // patch)
    scale = min(1, math.sqrt(most / count), limit * patch / image.width, limit * patch / image.height)
    width, height = (min(max(1, int(each * scale)), limit * patch) for each in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    if "A" in image.getbands():
        board, values = settings["transparent_bg_config"], np.zeros((height, width, 3), np.uint8)
        side = board["chessboard_square_size"]
        for y in range(height):
            for x in range(width):
                is_gray = (y // side + x // side) % 2 == 1
                values[y, x] = board["chessboard_gray_value" if is_gray else "chessboard_white_value"]
        pixels = np.array(image.convert("RGBA"))
        alpha = pixels[:, :, 3:].astype(np.float32) / 255.0
        seen = (alpha * pixels[:, :, :3] + (1 - alpha) * values).astype(np.uint8)
    else:
        seen = np.asarray(image.convert("RGB"))
    side = patch * settings["merge_kernel_size"]
    return np.pad(seen, ((0, -height % side), (0, -width % side), (0, 0)))
