"""Cuts a model down to one pipeline stage: some layers, with embeddings in the first stage and the head in the last."""

from __future__ import annotations

import jax

from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.kv_cache_spec import SharesCache
from jaxis.layers.module import JaxModule, named_modules
from jaxis.models.common.decoder import CausalLM, DecoderModel
from jaxis.parallel.stages import Stage


class ElsewhereLayer(JaxModule):
    """Placeholder of a layer of another stage, so that layers keep their numbers; returns its input."""

    def __call__(self, kv_cache: LayerCache, x: jax.Array, *others: object) -> LayerOutput:
        del others
        return kv_cache, x


class Elsewhere(JaxModule):
    """Placeholder of another module of another stage; it is never called."""


def cut_to_stage(model: JaxModule, stage: Stage) -> None:
    """Removes everything that belongs to other stages from a model that is not loaded yet.

    The model then has the caches of its own layers and loads only what it has. It takes the output of the stage before
    as `intermediate_tensors`. In place of normed hidden states, it returns the output for the stage after. Raises
    ConfigError if the model cannot be divided into these stages.
    """
    if stage.num_stages == 1:
        return
    if not isinstance(model, CausalLM):
        raise _refusal(stage, f"{type(model).__name__} does not say what its layers are")
    decoder = model.decoder
    own = stage.layers(len(decoder.layers))
    _check_layers(decoder, stage)
    elsewhere: list[str] = []
    first_entry = cache_entries(model, stage).start
    decoder.cache_entries = tuple(
        tuple(entry - first_entry for entry in entries) if i in own else ()
        for i, entries in enumerate(decoder.cache_entries)
    )
    for i in range(len(decoder.layers)):
        if i not in own:
            decoder.layers[i] = ElsewhereLayer()
            elsewhere.append(f"model.layers.{i}.")
    is_tied = model.lm_head is None
    if not (stage.is_first or (stage.is_last and is_tied)):
        _leave_out(decoder, "embed_tokens")
        elsewhere.append("model.embed_tokens.")
    if not stage.is_first:
        decoder.embed_norm = decoder.embed_positions = None
        elsewhere += ["model.embed_norm.", "model.embed_positions."]
    if not stage.is_last:
        decoder.norm, decoder.hands_on = Elsewhere(), True
        elsewhere.append("model.norm.")
        if not is_tied:
            _leave_out(model, "lm_head")
            elsewhere.append("lm_head.")
    model.elsewhere = tuple(elsewhere)


def _leave_out(module: JaxModule, child: str) -> None:
    setattr(module, child, Elsewhere())


def cache_entries(model: JaxModule, stage: Stage) -> range:
    """Returns the range of a whole model's caches that belong to a stage's layers.

    Raises ConfigError if the model cannot be divided into stages.
    """
    if not isinstance(model, CausalLM):
        raise _refusal(stage, f"{type(model).__name__} does not say what its layers are")
    decoder = model.decoder
    entries = [entry for i in stage.layers(len(decoder.layers)) for entry in decoder.cache_entries[i]]
    return range(min(entries), max(entries) + 1) if entries else range(0)


def _check_layers(decoder: DecoderModel, stage: Stage) -> None:
    """Raises an error if layers of any stage need more than hidden states from another stage."""
    if decoder.has_layer_inputs:
        raise _refusal(stage, "its layers have embeddings of their own")
    if decoder.is_looped:
        raise _refusal(stage, "its layers run several times in a step")
    if decoder.has_shared_selection:
        raise _refusal(stage, "layers attend to the tokens that an earlier one has selected")
    if decoder.num_streams > 1:
        raise _refusal(stage, "its layers pass on several states of a token")
    num_layers = len(decoder.layers)
    for own in (Stage(index, stage.num_stages).layers(num_layers) for index in range(stage.num_stages)):
        for i in own:
            for _, module in named_modules(decoder.layers[i]):
                if isinstance(module, SharesCache) and module.shares_cache_of not in (None, *own):
                    raise _refusal(stage, f"layer {i} attends to the cache of layer {module.shares_cache_of}")


def _refusal(stage: Stage, reason: str) -> ConfigError:
    return ConfigError(
        f"pipeline_parallel_size={stage.num_stages}: this model cannot be divided into stages, since {reason}: use "
        "tensor_parallel_size"
    )
