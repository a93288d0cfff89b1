"""Loading of a draft model from a checkpoint of its own: configuration and weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxis.config import (
    LoadConfig,
    VllmConfig,
)
from jaxis.config.hf_config import HFConfig
from jaxis.config.speculative import SpeculativeConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_config import make_quant_config
from jaxis.host.progress import ProgressDisplay
from jaxis.loading.hub import resolve_model
from jaxis.loading.open_checkpoint import TensorListing, read_config_values
from jaxis.models.draft_loader import check_same_vocabulary, load_draft_model, load_eagle3
from jaxis.models.tied_tables import tables_of
from jaxis.quantization.arguments import requested_config

if TYPE_CHECKING:
    from jaxis.layers.module import JaxModule


def load_draft(
    args: EngineArgs,
    speculative: SpeculativeConfig,
    target: VllmConfig,
    model: JaxModule,
    mesh: jax.sharding.Mesh,
    progress: ProgressDisplay,
) -> None:
    """Loads a draft model into a loaded model, with the same longest sequence.

    Raises:
      ConfigError, CheckpointError: The checkpoint cannot be loaded, or was not made for this model.
    """
    assert speculative.model is not None
    _, draft_config = read_draft_config(args, speculative, target)
    if speculative.method == "draft_model":
        check_same_vocabulary(target, draft_config)
    load = {"eagle3": load_eagle3, "draft_model": load_draft_model}[speculative.method]
    with progress.loading(speculative.model) as on_progress:
        load(model, draft_config, mesh, on_progress)


def read_draft_config(
    args: EngineArgs, speculative: SpeculativeConfig, target: VllmConfig
) -> tuple[EngineArgs, VllmConfig]:
    """Returns the arguments and the configuration of the draft model.

    Raises:
      ConfigError, CheckpointError: The checkpoint is not there, or cannot be quantized in the requested format.
    """
    assert speculative.model is not None
    path = resolve_model(speculative.model, revision=speculative.revision, token=args.token, cache_dir=args.cache_dir)
    config = read_config_values(path)
    hf_config = tables_of(HFConfig(config.values, source=config.source), path).config
    args = dataclasses.replace(
        args, quantization=speculative.quantization or args.quantization, additional_config=None, load_format="auto"
    )
    return args, dataclasses.replace(
        target,
        model_config=dataclasses.replace(target.model_config, model=str(path), hf_config=hf_config),
        load_config=LoadConfig(),
        quant_config=make_quant_config(
            args, TensorListing(path), hf_config, requested_config(args.requested_quantization)
        ),
    )
