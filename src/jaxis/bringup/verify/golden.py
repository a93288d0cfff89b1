"""The reference logits for a comparison, and a file of them for machines where the reference cannot run.

The safetensors file has each prompt's tokens, the rows that were kept and their logits; a prompt's greedy continuation;
and, in its metadata, the versions that made it and the hashes of the files that it was made from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.loading.safetensors_writer import write_tensors

_FORMAT = "jaxis golden logits 1"
_HASHED_BYTES = 4096  # of each tensor


@dataclass(frozen=True)
class PromptLogits:
    """The reference's logits [N, V], float32, for one prompt, at the positions `rows`, int32 [N]."""

    token_ids: np.ndarray
    rows: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True)
class Golden:
    """The reference's answers.

    Attributes:
      decode_prompt: int32 [T], prompt that was continued.
      continuation: int32 [N], greedy continuation.
      continuation_logits: float32 [N, V], logits from which its tokens were chosen.
      hashes: `checkpoint_hashes` of the config.json and weights that they were made from.
    """

    prompts: tuple[PromptLogits, ...]
    decode_prompt: np.ndarray
    continuation: np.ndarray
    continuation_logits: np.ndarray
    versions: Mapping[str, str]
    hashes: Mapping[str, str]

    def save(self, path: Path) -> None:
        arrays = {
            "decode.prompt": self.decode_prompt,
            "decode.token_ids": self.continuation,
            "decode.logits": self.continuation_logits,
        }
        for i, prompt in enumerate(self.prompts):
            arrays |= {
                f"prompts.{i}.token_ids": prompt.token_ids,
                f"prompts.{i}.rows": prompt.rows,
                f"prompts.{i}.logits": prompt.logits,
            }
        facts = {"versions": json.dumps(dict(self.versions)), "hashes": json.dumps(dict(self.hashes))}
        write_tensors(path, arrays, {"kind": _FORMAT, **facts})

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Reads a file that `save` wrote. Raises CheckpointError if it cannot be read, or was not written by `save`."""
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}: make it with --save-golden where the reference runs")
        with SafetensorsFile(path) as file:
            if file.metadata.get("kind") != _FORMAT:
                raise CheckpointError(f"{path} holds no reference logits: make it with --save-golden")
            names = sorted({int(name.split(".")[1]) for name in file.names if name.startswith("prompts.")})
            return cls(
                prompts=tuple(
                    PromptLogits(
                        *(np.array(file.tensor(f"prompts.{i}.{part}")) for part in ("token_ids", "rows", "logits"))
                    )
                    for i in names
                ),
                decode_prompt=np.array(file.tensor("decode.prompt")),
                continuation=np.array(file.tensor("decode.token_ids")),
                continuation_logits=np.array(file.tensor("decode.logits")),
                versions=json.loads(file.metadata["versions"]),
                hashes=json.loads(file.metadata["hashes"]),
            )

    def check_made_from(self, hashes: Mapping[str, str], path: Path) -> None:
        """Raises CheckpointError if the file was made from another checkpoint."""
        for what, expected in self.hashes.items():
            if hashes.get(what) != expected:
                raise CheckpointError(f"{path} was made from other {what}: make it again from this checkpoint")


def checkpoint_hashes(folder: Path) -> dict[str, str]:
    """Computes the SHA-256 of config.json, and of every tensor's name, type, shape and first bytes.

    The weights are not read in full: for a terabyte checkpoint, that would take longer than the comparison.
    """
    weights = hashlib.sha256()
    with Checkpoint(folder) as checkpoint:
        for name in sorted(checkpoint.names()):
            info = checkpoint.info(name)
            weights.update(f"{name} {info.dtype} {info.shape}".encode())
            weights.update(checkpoint.tensor(name).reshape(-1)[: _HASHED_BYTES // info.dtype.itemsize].tobytes())
    config = hashlib.sha256((folder / "config.json").read_bytes())
    return {"config.json": config.hexdigest(), "weights": weights.hexdigest()}
