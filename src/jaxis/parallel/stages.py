"""Pipeline stages: which of a model's layers lie on which devices, where they do not all lie on the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxis.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """One of the stages that a model's layers are divided among, in their order.

    The first has the token embeddings as well, and the last the final norm and the head.

    Attributes:
      index: From 0.
      num_stages: All of them.
    """

    index: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Whether steps begin here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens are sampled here."""
        return self.index == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """The stage's own of a model's layers: as many as the others', or one more.

        The last stage has one less, then the first, since they have embeddings and head.

        Args:
          num_layers: Of the model.

        Raises:
          ConfigError: They are fewer than the stages.
        """
        if num_layers < self.num_stages:
            raise ConfigError(
                f"pipeline_parallel_size={self.num_stages} is more than the model's {num_layers} layers: give a "
                "smaller one"
            )
        each, more = divmod(num_layers, self.num_stages)
        # From the last but one towards the first.
        first_with_more = self.num_stages - 1 - more
        sizes = [each + (first_with_more <= index < self.num_stages - 1) for index in range(self.num_stages)]
        start = sum(sizes[: self.index])
        return range(start, start + sizes[self.index])


WHOLE = Stage()
"""The only stage of a model on one mesh."""


def first_host(mesh: Mesh) -> int:
    """The lowest rank of a host that has devices of a mesh."""
    return min(device.process_index for device in mesh.devices.flat)


def own_stages(meshes: Sequence[Mesh]) -> list[Stage]:
    """The pipeline stages on devices of this host, with these meshes of all stages."""
    return [Stage(index, len(meshes)) for index, mesh in enumerate(meshes) if mesh.local_devices]
