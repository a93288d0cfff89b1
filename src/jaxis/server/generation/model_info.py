from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from jaxis.engine.client.engine_client import EngineInfo
from jaxis.engine.embedded_inputs.info import InputInfo
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.tokenizer import Tokenizer

_WEIGHTS = {".safetensors", ".gguf"}
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot"}
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True)
class ServedModelInfo:
    """Facts of the served model for its clients. They stay the same while the model is loaded.

    Attributes:
      file_name: Last part of the checkpoint's path.
      architecture: `model_type` of config.json.
      file_bytes: Size of the checkpoint's files.
      modified: Time of the newest change to the files.
      digest: Identifier of the checkpoint in lists: SHA-256 of the files' names, sizes and times. The weights are not
        part of it, since reading them would take minutes.
      weight_type: Type in which most of its weights are stored, such as "int8"; "" if that is unknown.
      context_length: Most tokens of a request, prompt and answer together.
      trained_len: Longest context that the checkpoint claims to support; None if it names none.
      has_chat_template: True if conversations can be rendered.
      has_tools, has_reasoning: True if the model can call tools; true if it reasons before its answer.
      tasks: Capabilities without tools and reasoning, in the words of most APIs.
      input_modalities: Kinds of input in prompts, such as "text" and "image".
    """

    file_name: str
    architecture: str
    file_format: Literal["gguf", "safetensors"]
    file_bytes: int
    modified: datetime
    digest: str
    num_parameters: int
    weight_type: str
    context_length: int
    trained_len: int | None
    has_chat_template: bool
    has_tools: bool
    has_reasoning: bool
    tasks: tuple[str, ...] = ("completion",)
    input_modalities: tuple[str, ...] = ("text",)

    @classmethod
    def of(cls, info: EngineInfo, tokenizer: Tokenizer | None, parsers: ModelParsers) -> ServedModelInfo:
        templates = tokenizer.chat_templates.values() if tokenizer else ()
        return dataclasses.replace(
            cls.of_files(info.model_folder),
            architecture=info.model_type or "unknown",
            num_parameters=info.num_parameters,
            weight_type=info.weight_type,
            context_length=info.max_model_len,
            trained_len=info.trained_len,
            has_chat_template=bool(templates),
            has_tools=parsers.tool_format_known and any("tools" in template for template in templates),
            has_reasoning=parsers.reasoning is not None,
            tasks=info.capabilities,
            input_modalities=("text", *(kind for kind, most in InputInfo.of(info.features).max_inputs.items() if most)),
        )

    @classmethod
    def of_files(cls, path: str) -> ServedModelInfo:
        """Reads the facts of a model that is not loaded from its checkpoint's files.

        A path "", and a missing one, count as a checkpoint without files.
        """
        files = _checkpoint_files(path)
        listing = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in sorted(files.items()))
        return cls(
            file_name=Path(path).name,
            architecture="unknown",
            file_format="gguf" if any(name.endswith(".gguf") for name in files) else "safetensors",
            file_bytes=sum(stat.st_size for stat in files.values()),
            modified=datetime.fromtimestamp(max((stat.st_mtime for stat in files.values()), default=0), UTC),
            digest=hashlib.sha256(listing.encode()).hexdigest(),
            num_parameters=0,
            weight_type="",
            context_length=0,
            trained_len=None,
            has_chat_template=False,
            has_tools=False,
            has_reasoning=False,
        )

    @property
    def parameter_size(self) -> str:
        """Number of parameters in short form, such as "7.6B"."""
        for factor, letter in _UNITS:
            if self.num_parameters >= factor:
                return f"{self.num_parameters / factor:.3g}{letter}"
        return str(self.num_parameters)

    def capabilities(self, name_of_reasoning: str) -> list[str]:
        """Returns the model's capabilities in the words of most APIs, which differ in the name of reasoning."""
        has = {"tools": self.has_tools, name_of_reasoning: self.has_reasoning}
        return [*self.tasks, *(capability for capability, present in has.items() if present)]


def rfc3339(time: datetime) -> str:
    """Returns a time in UTC as "2026-11-22T10:00:00.000000Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _checkpoint_files(path: str) -> dict[str, os.stat_result]:
    """Returns a checkpoint's files by name: a file itself, or the files of a folder; "" has none.

    Weights in formats that are never read are left out. An Orbax checkpoint keeps its weights in subfolders.
    """
    if not path or not Path(path).exists():
        return {}
    root = Path(path)
    files = [root] if root.is_file() else list(root.iterdir())
    if not any(file.suffix in _WEIGHTS for file in files):
        files = list(root.rglob("*"))
    kept = [file for file in files if file.is_file() and file.suffix not in _OTHER_WEIGHTS]
    return {file.relative_to(root.parent).as_posix(): file.stat() for file in kept}
