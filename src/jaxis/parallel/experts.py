"""How many devices can have a layer's experts, whole ones and as many on each."""

from __future__ import annotations

from jaxis.errors import ConfigError


def check_experts(num_experts: int, num_devices: int) -> None:
    """Checks that devices can have equally many experts.

    Args:
      num_experts: X of a layer.
      num_devices: All that run the model.

    Raises:
      ConfigError: They cannot.
    """
    if num_experts % num_devices == 0:
        return
    sizes = [size for size in range(1, num_devices) if num_experts % size == 0]
    choice = " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))
    raise ConfigError(
        f"enable_expert_parallel: {num_devices} devices cannot have equally many of a layer's {num_experts} experts: "
        f"give {choice}, or leave it out, so that every device has a part of each expert"
    )
