"""A checkpoint on its way to the devices: finds and reads it, chooses its devices, loads its weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxis.config import VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.config.value_checks import check_values
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.draft_setup import load_draft
from jaxis.engine.engine_config import make_vllm_config
from jaxis.engine.execution.cache_memory import set_gpu_memory_utilization
from jaxis.engine.execution.handover import Handover
from jaxis.engine.execution.program_files import enable_disk_cache
from jaxis.engine.fingerprint import arguments_digest, checkpoint_digest, packing_digest
from jaxis.engine.loaded_model import LoadedModel
from jaxis.errors import ConfigError, JaxisError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.layers.module import JaxModule
from jaxis.loading.given_tensors import GivenTensors
from jaxis.loading.hub import resolve_model
from jaxis.loading.open_checkpoint import ConfigValues, read_config_values
from jaxis.loading.packed_name import is_packed
from jaxis.models.model_loader import load_model
from jaxis.packed.cache import PackCache
from jaxis.packed.folder import PackedFolder
from jaxis.parallel import distributed
from jaxis.parallel.equal_shares import check_heads
from jaxis.parallel.mesh import make_stage_meshes
from jaxis.parallel.stages import own_stages

EMBEDDED_MODEL = Path(__file__).parent.parent / "assets" / "tiny"


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint with its configuration, whose weights are not read yet.

    Attributes:
      path: Folder or file of the checkpoint.
      config: Values of its config.json.
      hf_config: The same values with the requested overrides.
      packed: Weights of a packed folder, whose bytes are being checked.
    """

    path: Path
    config: ConfigValues
    hf_config: HFConfig
    packed: PackedFolder | None = None

    def make_meshes(self, args: EngineArgs) -> list[jax.sharding.Mesh]:
        """Makes the mesh of each pipeline stage. All hosts of a stage, and of consecutive stages, have then met.

        Raises:
          ConfigError: There are not enough devices, or they cannot share the model's heads.
          EngineError: The hosts cannot reach each other.
        """
        _check_heads(self.hf_config, args.tensor_parallel_size)
        _check_context_is_latent(self.hf_config, args.decode_context_parallel_size)
        meshes = make_stage_meshes(
            args.pipeline_parallel_size,
            args.tensor_parallel_size,
            args.nnodes,
            data_parallel_size=args.data_parallel_size,
        )
        # All hosts must meet in the same order.
        for mesh in [*meshes, *(Handover(*pair).mesh for pair in itertools.pairwise(meshes))]:
            if 0 < len(mesh.local_devices) < mesh.size:
                distributed.meet(mesh)
        return meshes

    def make_config(self, args: EngineArgs, meshes: Sequence[jax.sharding.Mesh]) -> VllmConfig:
        """Returns the engine's configuration with an HFConfig of its own: its reads do not count as the model's."""
        hf_config = HFConfig(self.config.values, args.hf_overrides or {}, source=self.config.source)
        return make_vllm_config(args, self.path, hf_config, meshes[0].devices.flat[0].platform, packed=self.packed)

    def load(
        self,
        args: EngineArgs,
        meshes: Sequence[jax.sharding.Mesh],
        progress: ProgressDisplay,
        tensors: GivenTensors | None = None,
    ) -> LoadedModel:
        """Loads the weights; with several hosts, those that this host's devices need.

        Args:
          args: Arguments of the engine.
          meshes: Meshes of all pipeline stages, including those of other hosts.
          progress: Display of progress.
          tensors: Weights, for one pipeline stage; None: those of the checkpoint.

        Raises:
          ConfigError, CheckpointError, EngineError: The errors of `LLM`.
        """
        cache = self._pack_cache(args) if tensors is None else None
        packed = self.packed if cache is None else cache.find()
        try:
            vllm_config, models = self._load(args, meshes, progress, tensors, packed)
        except JaxisError as error:
            if cache is None or packed is None:
                raise
            progress.note(str(error))
            cache.remove()
            packed = None
            vllm_config, models = self._load(args, meshes, progress, tensors, packed)
        if cache is not None and packed is None and cache == self._pack_cache(args):  # the files have not changed
            progress.note(cache.keep(models[0], np.dtype(vllm_config.model_config.dtype).name))
        if (speculative := vllm_config.speculative_config) is not None and speculative.model is not None:
            load_draft(args, speculative, vllm_config, models[0], meshes[0], progress)
        return LoadedModel(vllm_config, meshes, models)

    def _load(
        self,
        args: EngineArgs,
        meshes: Sequence[jax.sharding.Mesh],
        progress: ProgressDisplay,
        tensors: GivenTensors | None,
        packed: PackedFolder | None,
    ) -> tuple[VllmConfig, list[JaxModule]]:
        """Returns the configuration and the models of this host's stages, with the weights of `packed` if given."""
        platform = meshes[0].devices.flat[0].platform
        stored = None if tensors is None else tensors.stored
        vllm_config = make_vllm_config(args, self.path, self.hf_config, platform, stored, packed)
        name, models = str(args.model or "the embedded model"), []
        for stage in own_stages(meshes):
            of_stages = f", stage {stage.index + 1} of {len(meshes)}" if len(meshes) > 1 else ""
            with progress.loading(name + of_stages) as on_progress:
                mesh = meshes[stage.index]
                models.append(load_model(vllm_config, mesh, on_progress, stage=stage, tensors=tensors))
        return vllm_config, models

    def _pack_cache(self, args: EngineArgs) -> PackCache | None:
        """Returns the place of the weights in the pack cache; None if they are not asked for there, or packed already.

        Raises ConfigError if they are asked for, and the native kernels are not used.
        """
        if not args.pack_cache or is_packed(self.path):
            return None
        if not native.usable() or args.num_devices > 1:
            raise ConfigError("pack_cache is for the native kernels on one CPU device: leave it out")
        digest = packing_digest(self.path, self.hf_config, args)
        return None if digest is None else PackCache(digest, str(args.model or "embedded"), args.pack_cache_bytes)


def open_model(args: EngineArgs) -> OpenedModel:
    """Finds the checkpoint, on the hub if needed, and reads its configuration.

    Raises:
      ConfigError, CheckpointError: The errors of `LLM`.
    """
    enable_disk_cache()
    set_gpu_memory_utilization(args.gpu_memory_utilization)
    if args.model is None:
        path = EMBEDDED_MODEL
    else:
        path = resolve_model(args.model, revision=args.revision, token=args.token, cache_dir=args.cache_dir)
    packed = PackedFolder(path) if is_packed(path) and args.load_format != "dummy" else None
    if packed is not None and native.usable():
        _ = packed.digests
    config = read_config_values(path)
    hf_config = HFConfig(config.values, args.hf_overrides or {}, source=config.source)
    check_values(hf_config)
    return OpenedModel(path, config, hf_config, packed)


def facts_of_model(path: Path, args: EngineArgs) -> dict[str, str]:
    """Returns facts that must be the same on all hosts of a group, once each has found the model's files."""
    return {
        "the digest of the model's files": checkpoint_digest(path),
        "the digest of the engine's arguments": arguments_digest(args),
        "the native library": str(native.isa()),
    }


def _check_heads(hf_config: HFConfig, tensor_parallel_size: int) -> None:
    """Raises a ConfigError if the devices cannot share the model's heads, before its weights are read."""
    num_heads = hf_config.get_text_config().get("num_attention_heads")
    if num_heads is None:  # a model with recurrent layers only
        return
    # Read from a copy, so that the key counts as ignored by models that do not read it.
    num_kv_heads = hf_config.get_text_config().to_dict().get("num_key_value_heads") or num_heads
    check_heads(num_heads, num_kv_heads, tensor_parallel_size)


def _check_context_is_latent(hf_config: HFConfig, decode_context_parallel_size: int) -> None:
    """Raises a ConfigError if devices should share the context of a model that caches heads instead of latents."""
    has_latents = hf_config.get_text_config().to_dict().get("kv_lora_rank") is not None
    if decode_context_parallel_size > 1 and not has_latents:
        raise ConfigError(
            f"decode_context_parallel_size={decode_context_parallel_size} is for caches of latents, which this model "
            "does not have: its devices share the heads of keys and values; use 1"
        )
