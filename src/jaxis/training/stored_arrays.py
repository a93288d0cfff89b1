"""Arrays of a checkpoint in Orbax's format, of which each process writes and reads the shards on its own devices.

A folder of an array has a file for each shard, as zarr has it, so that any number of devices can read it. A file that
describes the tree makes Orbax open the whole. Source:
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.extras import check_extra
from jaxis.loading.orbax_checkpoint import zarr_request

if TYPE_CHECKING:
    import tensorstore

Arrays = Mapping[str, Mapping[str, jax.Array]]
"""Arrays by the names of their group and their own."""

_METADATA = "_METADATA"
_DICT_KEY = 2  # as Orbax numbers the kinds of keys


def describe_arrays(folder: Path, arrays: Arrays) -> None:
    """Writes the file that Orbax reads first; one process does."""
    tree = {
        str((group, name)): {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in (group, name)],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for group, members in arrays.items()
        for name in members
    }
    folder.mkdir(exist_ok=True)
    (folder / _METADATA).write_text(
        json.dumps({"tree_metadata": tree, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}), "utf-8"
    )


def write_arrays(folder: Path, arrays: Arrays) -> None:
    """Writes the shards of this process. Raises OSError if a file cannot be written."""
    check_extra("orbax", "a checkpoint of a training")
    for group, members in arrays.items():
        for name, array in members.items():
            own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
            if not own:
                continue
            try:
                stored = _open(folder, group, name, array.dtype, array.shape, own[0].data.shape)
                for written in [stored[shard.index].write(np.asarray(shard.data)) for shard in own]:
                    written.result()
            except ValueError as error:
                code = re.search(r"os_error_code='(\d+)'", str(error))
                raise OSError(_line(error) if code is None else os.strerror(int(code[1]))) from None


def read_arrays(folder: Path, alike: Arrays) -> dict[str, dict[str, jax.Array]]:
    """Reads arrays with the names, shapes and placement of others.

    Raises CheckpointError if one is not there, has another shape, or is damaged.
    """
    check_extra("orbax", "a checkpoint of a training")
    return {
        group: {name: _read(folder, group, name, like) for name, like in members.items()}
        for group, members in alike.items()
    }


def _read(folder: Path, group: str, name: str, like: jax.Array) -> jax.Array:
    try:
        stored = _open(folder, group, name, like.dtype, like.shape)
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: np.asarray(stored[index].read().result())
        )
    except ValueError as error:
        raise CheckpointError(f"{folder.parent} is damaged, or of another model: {name}: {_line(error)}") from None


def _open(
    folder: Path, group: str, name: str, dtype: Any, shape: tuple[int, ...], chunk: tuple[int, ...] | None = None
) -> tensorstore.TensorStore:
    """Opens an array; creates it with chunks of this shape if one is given."""
    import tensorstore

    request = zarr_request(folder / f"{group}.{name}", shape, np.dtype(dtype), chunk) | {
        # The folder is synced as a whole; others' files, which this host may not see yet, are synced by them.
        "context": {"file_io_sync": jax.process_count() > 1},
        "fill_missing_data_reads": False,  # a missing file is damage, and not an array of zeros
    }
    return tensorstore.open(request, open=True, create=chunk is not None).result()


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(" [tensorstore_spec")[0]
