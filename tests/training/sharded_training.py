"""Trains on all devices of this process, as `python -m tests.training.sharded_training CONFIG.json`.

Prints which part of the bytes of what is trained and of the optimizer's moments the device with the most of them has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxis.training.checkpoint import Checkpoints
from jaxis.training.config import TrainConfig
from tests.support import training


def main() -> None:
    """Trains."""
    shares = []
    save = Checkpoints.save

    def observed(self: Checkpoints, state: Any) -> Any:
        arrays = jax.tree.leaves((state.trained, state.moments))
        held = dict.fromkeys(jax.local_devices(), 0)
        for array in arrays:
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        shares.append(max(held.values()) / sum(array.nbytes for array in arrays))
        return save(self, state)

    Checkpoints.save = observed
    _, lines = training.run(TrainConfig.of(json.loads(Path(sys.argv[1]).read_text())))
    print(json.dumps({"share": max(shares), "devices": jax.local_device_count(), "lines": lines}))


if __name__ == "__main__":
    main()
