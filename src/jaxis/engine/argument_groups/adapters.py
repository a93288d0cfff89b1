"""Arguments of adapters (LoRA), merged or by request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxis.config.vllm_config import TensorChanges
from jaxis.engine.argument_groups.combinations import EngineFeature
from jaxis.engine.argument_groups.info import argument
from jaxis.engine.argument_groups.loading import LoadingArguments
from jaxis.errors import ConfigError
from jaxis.rooms import room_module


@dataclass(frozen=True)
class AdapterArguments(LoadingArguments):
    """An adapter for all requests, and room for adapters of single requests."""

    adapter: str | os.PathLike[str] | None = argument(
        None,
        room="lora",
        description="Folder of an adapter (LoRA) in PEFT's format; needs `merge`. See [adapters](adapters.md).",
        metavar="FOLDER",
        help="An adapter (LoRA) in PEFT's format; see --merge.",
    )
    merge: bool = argument(
        False,
        description="Merge it into the weights as they are loaded: float32 sums, rounded to the checkpoint's type.",
        help="Merge the adapter into the weights as they are loaded.",
    )
    enable_lora: bool = argument(
        False,
        in_fingerprint=False,
        room="lora",
        description=(
            "Let each request have an adapter of its own (`LoRARequest`). See "
            "[adapters](adapters.md#adapters-by-request)."
        ),
    )
    max_loras: int = argument(
        1,
        description=(
            "Most adapters in a step; requests with others wait. Each takes memory, whether or not it is used."
        ),
        minimum=1,
        speed_only=True,
    )
    max_lora_rank: int = argument(16, description="Largest rank of such an adapter.", minimum=1, speed_only=True)
    max_cpu_loras: int | None = argument(
        None,
        description="Most adapters that are kept in memory, in use or not; None is all.",
        minimum=1,
        speed_only=True,
    )
    lora_target_modules: Sequence[str] | None = argument(
        None,
        description=(
            'The layers that such adapters have room for: ends of their names, such as "q_proj", and '
            '"all-linear", which None is. Embeddings ("embed_tokens"), heads ("lm_head") and experts ("experts") '
            "must be named."
        ),
        documented_default='`["all-linear"]`',
        speed_only=True,
    )
    lora_modules: Mapping[str, str] | None = argument(
        None,
        in_fingerprint=False,
        room="lora",
        description="Name -> folder of adapters that are loaded at the start, for a server.",
        speed_only=True,
    )
    lora_root: str | os.PathLike[str] | None = argument(
        None, in_fingerprint=False, description="A folder outside of which no adapter is read.", speed_only=True
    )

    def check(self) -> None:
        if self.merge and self.adapter is None:
            raise ConfigError("merge needs adapter: the folder of what is merged")
        if self.adapter is not None and not self.merge:
            raise ConfigError(
                f"adapter={str(self.adapter)!r} needs merge, to be merged into the weights; for adapters by request, "
                "give LLM enable_lora, and jaxis serve --enable-lora --lora-modules NAME=FOLDER"
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora")
        if isinstance(self.lora_target_modules, str):
            raise ConfigError('lora_target_modules is a list of names, such as ["q_proj", "v_proj"]')
        if self.max_cpu_loras is not None and len(self.lora_modules or ()) > self.max_cpu_loras:
            num_named = len(self.lora_modules or ())
            raise ConfigError(f"max_cpu_loras={self.max_cpu_loras} is less than the {num_named} of lora_modules")
        if self.lora_root is not None and not os.path.isdir(self.lora_root):
            raise ConfigError(f"lora_root={str(self.lora_root)!r} is not a folder")
        if self.adapter is not None and self.load_format == "dummy":
            raise ConfigError("adapter needs the weights that it was trained on: leave out load_format='dummy'")

    @property
    def tensor_changes(self) -> TensorChanges | None:
        """Changes of the checkpoint's tensors while they are loaded; None for none."""
        return None if self.adapter is None else room_module("lora", "merge", "--adapter").MergedAdapter(self.adapter)

    @property
    def template_folder(self) -> str | os.PathLike[str] | None:
        """Folder whose chat template, if it has one, takes the place of the checkpoint's."""
        return self.adapter

    def features(self) -> dict[EngineFeature, tuple[bool, str]]:
        return {EngineFeature.ADAPTERS: (self.enable_lora, "enable_lora")}
