"""Names of models on the Hub, and the choice of a GGUF file where a repository has a model in many quantizations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from jaxis.errors import CheckpointError
from jaxis.loading.gguf_files import is_model_file, model_name

_MAX_SHOWN = 40
_QUANTIZATION = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|(?:MX|NV)FP4\w*|BF16|F16|F32)(?![A-Z0-9])", re.IGNORECASE
)


@dataclass(frozen=True)
class HubName:
    """Name of a model on the Hub, as a user gives it.

    `quantization` is the part after a colon, such as Q4_K_M, and `file` the path of one GGUF file in the repository;
    both may be empty.
    """

    repository: str
    quantization: str = ""
    file: str = ""

    @property
    def chooses_file(self) -> bool:
        return bool(self.quantization or self.file)


def parse_hub_name(name: str) -> HubName | None:
    """Parses `org/name`, `org/name:QUANTIZATION` or `org/name/path/file.gguf`; None if it is none of them."""
    if name.endswith(".gguf") and name.count("/") >= 2:
        organisation, repository, file = name.split("/", 2)
        return HubName(f"{organisation}/{repository}", file=file)
    repository, colon, quantization = name.partition(":")
    if not repository or repository.count("/") > 1 or (colon and not quantization) or repository.endswith(".gguf"):
        return None
    return HubName(repository, quantization)


def choose_gguf(wanted: HubName, files: Sequence[str]) -> list[str]:
    """Returns the files, all shards of one model, that a name means among all files in the repository.

    Raises CheckpointError if there is no such model, or more than one.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if is_model_file(path.name):
            models.setdefault(str(path.parent / model_name(path.name)), []).append(file)
    if wanted.file:
        chosen = {name: shards for name, shards in models.items() if wanted.file in shards}
    elif wanted.quantization:
        chosen = {name: shards for name, shards in models.items() if _is_quantized_as(name, wanted.quantization)}
    else:
        chosen = models
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    if not models:
        raise CheckpointError(f"{wanted.repository} has neither safetensors weights nor GGUF files: give another one")
    candidates = [shards[0] for shards in (chosen or models).values()]
    asked = wanted.file or wanted.quantization
    if chosen and asked:
        raise CheckpointError(
            f"{wanted.repository} has {len(chosen)} models {asked}: give the path of one, as "
            f"{wanted.repository}/{candidates[0]} (they are {_list(candidates)})"
        )
    choices = [_choice(file) for file in candidates]
    if asked:
        raise CheckpointError(f"{wanted.repository} has no GGUF file {asked}; it has {_list(choices)}")
    raise CheckpointError(
        f"{wanted.repository} has {len(chosen)} GGUF models: give one, as {wanted.repository}:{choices[0]} "
        f"(it has {_list(choices)})"
    )


def _list(names: list[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")


def _is_quantized_as(name: str, quantization: str) -> bool:
    """Returns whether the name of a model's files, or of their folder, has this word."""
    return re.search(rf"(?<![A-Z0-9_]){re.escape(quantization)}(?![A-Z0-9_])", name, re.IGNORECASE) is not None


def _choice(file: str) -> str:
    """Returns the word that distinguishes a model in a repository: its quantization, or else the file's name."""
    found = _QUANTIZATION.findall(model_name(PurePosixPath(file).name))
    return found[-1] if found else file
