from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxis.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive layers of a model, on devices of their own.

    The first stage also has the token embeddings, and the last one the final norm and the head.
    """

    index: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """True if steps begin here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if tokens are sampled here."""
        return self.index == self.num_stages - 1

    def layers(self, num_layers: int) -> range:
        """Returns the stage's layers of a model with `num_layers`: as many as the other stages', or one more.

        The last stage is the first to have one less, then the first stage, since they have the head and the embeddings.
        Raises ConfigError if there are fewer layers than stages.
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
    """Returns the lowest rank of a host that has devices of a mesh."""
    return min(device.process_index for device in mesh.devices.flat)


def own_stages(meshes: Sequence[Mesh]) -> list[Stage]:
    """Returns the pipeline stages on devices of this host, given the meshes of all stages."""
    return [Stage(index, len(meshes)) for index, mesh in enumerate(meshes) if mesh.local_devices]
