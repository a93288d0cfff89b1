"""Code shared by families whose tokens have several residual streams."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import StreamsDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.layers.streams import HyperConnection, HyperMixer, StreamsNorm
from jaxis.models.common.decoder import DecoderModel

CONNECTION_RENAMES: tuple[Rename, ...] = tuple(
    (f"hc_{block}_{part}", f"{block}_hc.{here}")
    for block in ("attn", "ffn")
    for part, here in (("fn", "fn.weight"), ("base", "base"), ("scale", "scale"))
)
"""DeepSeek V4's names of a layer's connections."""


class StreamsModel(DecoderModel):
    """A decoder of S streams, which begin as copies of the embeddings; its final norm mixes them."""

    layers: Sequence[StreamsDecoderLayer]

    def add_parts(self, scope: LayerScope) -> None:
        self.num_streams = num_streams(scope.config)

    def first_input(self, x: jax.Array) -> jax.Array:
        return jnp.repeat(x[:, None], self.num_streams, axis=1)


def num_streams(config: HFConfig) -> int:
    """Returns S."""
    return config.get("hc_count" if "hc_count" in config else "hc_mult", 4)


def manifold_connection(scope: LayerScope) -> HyperConnection:
    """Creates DeepSeek V4's connection, with config.json's `hc_eps` and `hc_sinkhorn_iters`."""
    config = scope.config
    return HyperConnection(
        scope,
        num_streams(config),
        epsilon=config.get("hc_eps", 1e-6),
        sinkhorn_iterations=config.get("hc_sinkhorn_iters", 20),
    )


def mixing_norm(scope: LayerScope) -> StreamsNorm:
    """Creates DeepSeek V4's final norm, of a mixture of the streams, with config.json's `hc_eps`."""
    return StreamsNorm(scope, last_mixer(scope / "mixer"))


def last_mixer(scope: LayerScope) -> HyperMixer:
    """Creates the mixture of streams in that norm."""
    config = scope.config
    return HyperMixer(scope, num_streams(config), epsilon=config.get("hc_eps", 1e-6))
