"""The decoder-only stack that families share: embeddings, layers, final norm, logits.

A family's file defines its layer and names it in its `ForCausalLM` class; this module knows nothing else about layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import CheckpointNames, Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.embed import JaxLmHead, PositionEmbedding
from jaxis.layers.kv_cache_spec import HandsOnSelection, HasCache, SharesCache
from jaxis.layers.leaves import embedding, lm_head, rms_norm
from jaxis.layers.module import JaxModule, calls_are_observed, named_modules
from jaxis.layers.norm import Norm
from jaxis.layers.routing import RouterObserver, observe_routers
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import HasState
from jaxis.layers.uncached import UncachedKeysAndValues
from jaxis.models.common.config_rules import ConfigRules
from jaxis.models.common.interfaces import JaxIntermediateTensors, LayerAdditions, LoadableWithIterator
from jaxis.models.common.prediction_layers import (
    DraftParts,
    num_prediction_layers,
    without_layers,
)
from jaxis.models.common.tables import EMBEDDINGS, HEAD, lasting, same_bytes
from jaxis.parallel.mesh import MESH_AXES, automatic_axes

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.config.quantization import QuantizationConfig

Caches = list[Any] | None
"""One entry for each layer that caches, in order: an array of blocks or the arrays of a state. None for no caches."""


LayerRunner = Callable[..., LayerOutput]
"""Function with the arguments and the result of `run_layer`."""


RunOfLayer = Callable[..., jax.Array]
"""Function (index of a layer, its input [T, E], number of the run, 0 by default) -> its output [T, E].

The runs of a layer are numbered from 0, in order.
"""


class LayerClass(Protocol):
    """Creates a decoder layer, which maps (kv_cache, x [T, E], metadata) to the updated cache and [T, E].

    The layer also takes the arrays that `DecoderModel.layer_inputs` returns for it.
    """

    def __call__(self, scope: LayerScope) -> JaxModule: ...


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """A family's settings outside its decoder layers.

    Attributes:
      norm: Final norm; None means an RMS norm with config.json's `rms_norm_eps`. A `CausalLM` has it as `make_norm`.
      embed_size: Size of a token's embedding; None means config.json's `hidden_size`.
      embed_scale: Factor of the embeddings, rounded to their type.
      embed_norm: Norm of the embeddings; None for no norm.
      embed_positions: Embeddings of positions, added to those of tokens; None for none.
      embedding_multiplier: Factor of the first layer's input, `inputs_embeds` included.
      head_bias: True if an untied head has a bias.
      logits_multiplier: Factor of the logits.
      logits_soft_cap: Logits become `logits_soft_cap * tanh(logits / logits_soft_cap)`.
      num_layers: Number of layers; None means config.json's `num_hidden_layers`.
    """

    norm: Norm | None = None
    embed_size: int | None = None
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    embed_positions: PositionEmbedding | None = None
    embedding_multiplier: float = 1.0
    head_bias: bool = False
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    num_layers: int | None = None


class DecoderModel(JaxModule):
    """Token embeddings, layers, final norm.

    Attributes:
      cache_entries: Indices of each layer's entries in `kv_caches`: none, one or several. A layer that shares the cache
        of an earlier layer has that layer's indices. Layers that share an indexer's selection of tokens have one more
        index, after those of all `kv_caches`, since a selection lives for one step only.
      has_shared_selection: True if layers share an indexer's selection.
      hands_on: True if another pipeline stage follows and takes the output of the last layer; see `cut_to_stage`.
      aux_hidden_state_layers: Layers whose input states [T, E] the model also returns, for speculative decoding and for
        comparison with a reference; none by default. The number of layers means the output of the last layer, before
        the final norm. Where layers run again, the numbers are those of all runs.
      num_streams: S, the hidden states of a token that layers pass on, as [T, S, E]; 1 for [T, E].
    """

    num_streams = 1

    def __init__(self, scope: LayerScope, layer_class: LayerClass, options: DecoderOptions) -> None:
        self.embedding_multiplier = options.embedding_multiplier
        self.embed_tokens = embedding(scope / "embed_tokens", options.embed_size, scale=options.embed_scale)
        self.embed_norm = options.embed_norm
        self.embed_positions = options.embed_positions
        num_layers = options.num_layers or scope.config["num_hidden_layers"]
        self.layers = [layer_class(scope.layer(i)) for i in range(num_layers)]
        self.norm = options.norm or rms_norm(scope / "norm")
        self.cache_entries, self.has_shared_selection = _cache_entries(self.layers)
        self.hands_on = False
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.add_parts(scope)

    def add_parts(self, scope: LayerScope) -> None:
        """Creates what a family's decoder has besides embeddings, layers and the final norm."""

    def __call__(
        self,
        kv_caches: Caches,
        input_ids: jax.Array,
        attention_metadata: AttentionMetadata,
        *,
        inputs_embeds: jax.Array | None = None,
        layer_additions: LayerAdditions | None = None,
        intermediate_tensors: JaxIntermediateTensors | None = None,
        run_layer: LayerRunner | None = None,
    ) -> tuple[Caches, jax.Array, list[jax.Array]]:
        if intermediate_tensors is not None:
            embeddings = x = intermediate_tensors["hidden_states"]
        else:
            embeddings = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
            x = scaled(embeddings, self.embedding_multiplier)
            if self.embed_positions is not None:
                x = x + self.embed_positions(attention_metadata.input_positions)
            x = self.first_input(x)
        layer_inputs = self.layer_inputs(input_ids, embeddings)
        caches = self.step_caches(kv_caches)
        aux_hidden_states = []
        run_layer = run_layer or _usual_runner()
        runs = itertools.count()

        def run(i: int, x: jax.Array, number: int = 0) -> jax.Array:
            if next(runs) in self.aux_hidden_state_layers:
                aux_hidden_states.append(self.states_of(x))
            layer = self.layers[i]
            with jax.named_scope(f"layer_{i}"):
                call = layer if calls_are_observed() else functools.partial(run_layer, *nnx.split(layer))
                cache, x = call(self.cache_of_layer(caches, i, number), x, attention_metadata, *layer_inputs[i])
            if layer_additions is not None:
                x = layer_additions.after_layer(i, x)
            self.keep_cache_of_layer(caches, i, cache, number)
            return x

        x = self.run_layers(x, run)
        if next(runs) in self.aux_hidden_state_layers:
            aux_hidden_states.append(self.states_of(x))
        outputs = x if self.hands_on else self.norm(self.last_output(x))
        return None if kv_caches is None else caches[: len(kv_caches)], outputs, aux_hidden_states

    def embed(self, input_ids: jax.Array) -> jax.Array:
        """input_ids [T] -> [T, E], before `embedding_multiplier`."""
        x = self.embed_tokens(input_ids)
        return x if self.embed_norm is None else self.embed_norm(x)

    def first_input(self, x: jax.Array) -> jax.Array:
        """Embeddings [T, E] -> input of the first layer; overridden by families whose layers pass on something else."""
        return x

    def last_output(self, x: jax.Array) -> jax.Array:
        """Output of the last layer -> [T, E] before the final norm; the counterpart of `first_input`."""
        return x

    def states_of(self, x: Any) -> jax.Array:
        """Input of a layer -> its hidden states [T, E], or [T, S, E] of streams."""
        return x

    def run_layers(self, x: jax.Array, run: RunOfLayer) -> jax.Array:
        """Input of the first layer [T, E] -> output of the last one; overridden by families that run layers again."""
        for i in range(len(self.layers)):
            x = run(i, x)
        return x

    def num_runs(self, layer: int) -> int:  # noqa: ARG002 (looped models override it)
        """Returns how often a step runs a layer, over the same weights."""
        return 1

    def entries_of_run(self, layer: int, number: int) -> tuple[int, ...]:  # noqa: ARG002 (looped models override it)
        """Returns the entries of `kv_caches` of a layer's run of this number."""
        return self.cache_entries[layer]

    @property
    def is_looped(self) -> bool:
        return any(self.num_runs(i) > 1 for i in range(len(self.layers)))

    def cache_uses(self) -> Counter[int]:
        """Returns how many runs of layers use each entry of `kv_caches`."""
        runs = [(i, number) for i in range(len(self.layers)) for number in range(self.num_runs(i))]
        return Counter(entry for i, number in runs for entry in self.entries_of_run(i, number))

    @property
    def has_layer_inputs(self) -> bool:
        return any(map(_uses_token_ids, self.layers))

    def layer_inputs(self, input_ids: jax.Array, embeddings: jax.Array) -> Sequence[tuple[jax.Array, ...]]:
        """Returns further inputs of each layer besides cache, x and metadata: the token ids if it `uses_token_ids`.

        Takes input_ids i32 [T], and their embeddings [T, E] or `intermediate_tensors`' hidden states.
        """
        del embeddings
        return [(input_ids,) if _uses_token_ids(layer) else () for layer in self.layers]

    def step_caches(self, kv_caches: Caches) -> list[LayerCache]:
        """Returns the entries that `cache_entries` indexes, before the first layer; layers update them in turn."""
        caches: list[LayerCache] = self._uncached() if kv_caches is None else list(kv_caches)
        return [*caches, None] if self.has_shared_selection else caches

    def cache_of_layer(self, caches: Sequence[LayerCache], layer: int, number: int = 0) -> LayerCache:
        """Returns the entry of `step_caches` of a layer's run: a tuple for several entries; None for none."""
        entries = self.entries_of_run(layer, number)
        if len(entries) == 1:
            return caches[entries[0]]
        return tuple(caches[entry] for entry in entries) or None

    def keep_cache_of_layer(self, caches: list[LayerCache], layer: int, updated: LayerCache, number: int = 0) -> None:
        """Stores the updated entries of a layer's run in `step_caches`."""
        entries = self.entries_of_run(layer, number)
        for entry, cache in zip(entries, [updated] if len(entries) == 1 else updated or (), strict=True):
            caches[entry] = cache

    def _uncached(self) -> list[LayerCache]:
        """Returns stand-ins for `kv_caches` that run whole sequences without caches."""
        uses = self.cache_uses()
        num_caches = len(uses) - self.has_shared_selection
        return [UncachedKeysAndValues() if uses[entry] > 1 else None for entry in range(num_caches)]


def _cache_entries(layers: Sequence[JaxModule]) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Returns `cache_entries` and `has_shared_selection` of a `DecoderModel`."""
    named = [list(named_modules(layer)) for layer in layers]
    modules = [[module for _, module in of_layer] for of_layer in named]
    numbers = [_num_caches(layer, of_layer) for layer, of_layer in zip(layers, named, strict=True)]
    if not any(numbers):
        numbers = [1] * len(layers)  # modules that are not jaxis's: see `cache_specs`
    entries: list[tuple[int, ...]] = []
    stop = 0
    for of_layer, number in zip(modules, numbers, strict=True):
        owner = next((m.shares_cache_of for m in of_layer if isinstance(m, SharesCache)), None)
        # What is shared is the owner's first entry; those of an indexer are each layer's own.
        shared = () if owner is None else entries[owner][:1]
        entries.append((*shared, *range(stop, stop + number)))
        stop += number
    hand_on = [any(isinstance(m, HandsOnSelection) and m.hands_on_selection for m in of_layer) for of_layer in modules]
    own_and_shared = ((*own, stop) if hands_on else own for hands_on, own in zip(hand_on, entries, strict=True))
    return tuple(own_and_shared), any(hand_on)


def _uses_token_ids(layer: JaxModule) -> bool:
    return getattr(layer, "uses_token_ids", False)


def _num_caches(layer: JaxModule, modules: Sequence[tuple[str, nnx.Module]]) -> int:
    """Returns the number of a layer's modules with a cache or a state.

    Raises ValueError if they are made in another order than that of their names, in which Flax puts a loaded layer
    together: with random weights, they would get each other's caches.
    """
    names = [name for name, module in modules if isinstance(module, HasCache | HasState)]
    if names != sorted(
        names, key=lambda name: [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
    ):
        raise ValueError(f"{type(layer).__name__} makes {', '.join(names)} in another order than that of their names")
    return len(names)


def run_layer(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    kv_cache: LayerCache,
    x: jax.Array,
    attention_metadata: AttentionMetadata,
    *layer_inputs: jax.Array,
    observe: RouterObserver | None = None,
) -> LayerOutput:
    """Runs a layer; `observe` gets its routers' logits and choices."""
    layer = nnx.merge(graphdef, state)
    if observe is not None:
        observe_routers(layer, observe)
    return layer(kv_cache, x, attention_metadata, *layer_inputs)


# Equal layers are traced once: tracing is slower than loading.
_run_layer_as_call = jax.jit(run_layer, static_argnums=0)
_run_layer_inline = jax.jit(run_layer, static_argnums=0, inline=True)


def _usual_runner() -> LayerRunner:
    return _run_layer_inline if layers_are_inlined() else _run_layer_as_call


def layers_are_inlined() -> bool:
    """Returns whether layers are inlined in the program instead of functions in it that equal layers share.

    Among data ranks, in a region that is manual over some axes only, XLA for TPUs cannot divide a function called
    twice.
    """
    return 0 < len(automatic_axes()) < len(MESH_AXES)


class CausalLM(JaxModule, LoadableWithIterator, ConfigRules):
    """A decoder with an output head, which may be tied to the embeddings.

    A family sets `layer_class`, and overrides `check_config`, `options` and `prediction_names` as needed. It does not
    override the constructor, which has the signature of the model development guides.

    Attributes:
      layer_class: Factory of the decoder layers.
      model_class: Class of the decoder below the head.
      renames, other_names, transposed, module_renames, unadaptable: Fields of the family's `CheckpointNames`.
      supported_values, ignored_keys: Keys of config.json, as in `ConfigRules`.
      make_norm: Creates the norms; None for RMS norms with config.json's `rms_norm_eps`.
      make_final_norm: Creates the final norm if it is another one.
      tied_by_default: True if the head is tied to the embeddings when config.json does not say.
      default_prediction_layers: Number of layers that predict later tokens if config.json does not say; in checkpoints,
        they come after the model's own.
      prediction_modules: Name prefixes of other tensors that predict later tokens.
      buffers: Name suffixes, after the renames, of tensors that are computed here instead of loaded.
      router_aux_loss_coef: Default factor of the loss that balances routers in training; None for no such loss.
      checkpoint_names: Table of this model's names.
      lm_head: Output head; None if it is tied to the embeddings.
      draft: Module that drafts tokens for the model; None unless requested.
      elsewhere: Name prefixes of parameters of other pipeline stages; see `cut_to_stage`.

    Raises:
      ConfigError: config.json asks for something that the family does not support.
    """

    layer_class: ClassVar[LayerClass]
    model_class: ClassVar[type[DecoderModel]] = DecoderModel
    renames: ClassVar[Sequence[Rename]] = ()
    other_names: ClassVar[Sequence[Rename]] = ()
    transposed: ClassVar[tuple[str, ...]] = ()
    module_renames: ClassVar[Sequence[Rename] | None] = None
    unadaptable: ClassVar[tuple[str, ...]] = ()
    make_norm: ClassVar[Callable[[LayerScope], Norm] | None] = None
    make_final_norm: ClassVar[Callable[[LayerScope], Norm] | None] = None
    tied_by_default: ClassVar[bool] = False
    default_prediction_layers: ClassVar[int] = 0
    prediction_modules: ClassVar[tuple[str, ...]] = ()
    # Old versions of the reference saved this buffer; here the rope is computed from the config.
    buffers: ClassVar[tuple[str, ...]] = (".rotary_emb.inv_freq",)
    router_aux_loss_coef: ClassVar[float | None] = None
    draft: JaxModule | None = None
    elsewhere: tuple[str, ...] = ()

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        self.check_config(config)
        self.checkpoint_names = self.names_of(config)
        make_norm, make_final_norm = type(self).make_norm, type(self).make_final_norm
        scope = LayerScope(vllm_config, rng, quant_config, names=self.checkpoint_names, make_norm=make_norm)
        options = self.options(scope)
        if (make_last := make_final_norm or make_norm) is not None:
            options = dataclasses.replace(options, norm=make_last(scope / "model" / "norm"))
        self.logits_multiplier = options.logits_multiplier
        self.logits_soft_cap = options.logits_soft_cap
        self.num_prediction_layers = num_prediction_layers(config, self.default_prediction_layers)
        self.model = self.model_class(scope / "model", type(self).layer_class, options)
        is_tied = self.is_tied(scope.config, self.tied_by_default)
        self.lm_head = None if is_tied else self.head(scope / "lm_head", options)
        names = self.prediction_names(config) if self.num_prediction_layers else None
        self.prediction = names if vllm_config.load_config.prediction_layer else None
        if self.prediction is not None:
            self.draft = self.prediction.make_draft(scope, type(self).layer_class)
            self.model.aux_hidden_state_layers = self.prediction.layers_read(len(self.model.layers))
        elif vllm_config.load_config.prediction_layer:
            raise ConfigError(
                f"{scope.config.source} is of a model without layers that predict later tokens, or of one whose layers "
                "jaxis cannot use: draft tokens with another method than mtp and dspark"
            )

    @classmethod
    def names_of(cls, config: HFConfig) -> CheckpointNames:
        """Returns the table of names of a model with this config of its text."""
        renames, module_renames = cls.all_renames(config), cls.all_module_renames(config)
        return CheckpointNames(renames, cls.other_names, cls.transposed, module_renames, cls.unadaptable)

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Returns `renames` and further ones that depend on config.json, such as on the kinds of layers."""
        del config
        return cls.renames

    @classmethod
    def all_module_renames(cls, config: HFConfig) -> Sequence[Rename] | None:
        """Returns `module_renames` and further ones that depend on config.json."""
        del config
        return cls.module_renames

    @property
    def decoder(self) -> DecoderModel:
        return self.model

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        """Reads the settings outside the layers from config.json."""
        del scope
        return DecoderOptions()

    @classmethod
    def prediction_names(cls, config: HFConfig) -> DraftParts | None:
        """Returns the parts of the first prediction layer, or of layers that draft together; loaded only on request.

        None if they cannot be loaded. Further prediction layers are never loaded.
        """
        del config
        return None

    @classmethod
    def head(cls, scope: LayerScope, options: DecoderOptions) -> JaxLmHead:
        """Creates the output head if it is not tied to the embeddings."""
        return lm_head(scope, use_bias=options.head_bias)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits. The embeddings may have rows beyond them."""
        return (self.lm_head or self.decoder.embed_tokens).output_size

    def is_tied(self, config: HFConfig, default: bool) -> bool:
        """Returns whether the head is tied to the embeddings, by config.json or else by the family's `default`."""
        return config.get("tie_word_embeddings", default)

    def __call__(
        self,
        kv_caches: Caches,
        input_ids: jax.Array,
        attention_metadata: AttentionMetadata,
        *,
        inputs_embeds: jax.Array | None = None,
        layer_additions: LayerAdditions | None = None,
        intermediate_tensors: JaxIntermediateTensors | None = None,
        run_layer: LayerRunner | None = None,
    ) -> tuple[Caches, jax.Array, list[jax.Array]]:
        """Runs a flat batch of T tokens.

        Args:
          kv_caches: One paged cache for each layer with its own cache; None runs whole sequences without caches.
          input_ids: i32 [T].
          attention_metadata: Requests and positions of the tokens.
          inputs_embeds: [T, E], used instead of the embeddings of `input_ids`.
          layer_additions: Additions to the outputs of the first layers; None for none.
          intermediate_tensors: `hidden_states` [T, E] of an earlier pipeline stage, used instead of the other two
            inputs.
          run_layer: Function with the arguments and the result of the module's `run_layer`, which runs each layer; None
            runs them as usual, equal ones traced once.

        Returns:
          The updated caches, the hidden states [T, E] after the final norm, and the auxiliary hidden states of
          `aux_hidden_state_layers`. A pipeline stage that others follow returns the output of its last layer instead of
          normed states.
        """
        return self.decoder(
            kv_caches,
            input_ids,
            attention_metadata,
            inputs_embeds=inputs_embeds,
            layer_additions=layer_additions,
            intermediate_tensors=intermediate_tensors,
            run_layer=run_layer,
        )

    def compute_logits(self, hidden_states: jax.Array) -> jax.Array:
        """hidden_states [T, E] -> float32 logits [T, V]."""
        head = self.decoder.embed_tokens.decode if self.lm_head is None else self.lm_head
        logits = head(hidden_states)
        if self.logits_multiplier == 1 and self.logits_soft_cap is None:
            return logits
        logits = scaled(logits, self.logits_multiplier)
        if self.logits_soft_cap is not None:
            logits = self.logits_soft_cap * in_whole_vectors(jnp.tanh, logits / self.logits_soft_cap)
        return materialize(logits)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        names = self.checkpoint_names
        renamed = ((self.parameter_name(name), names.value_here(name, tensor)) for name, tensor in weights)
        kept = self.without_redundant_tensors(renamed)
        return super().load_weights((name, tensor) for name, tensor in kept if not name.startswith(self.elsewhere))

    def parameter_name(self, name_in_file: str) -> str:
        name = self.checkpoint_names.name_here(name_in_file)
        return name if self.prediction is None else self.prediction.parameter_name(name, "draft")

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Drops tensors that are no parameters of the model: prediction layers and duplicates.

        A tied model's table may have either name in the checkpoint; it is yielded under that of the embeddings. Raises
        CheckpointError if a tensor differs from the one it should duplicate, or cannot be its duplicate.
        """
        embedding = None
        tied_head = None
        first, last = len(self.decoder.layers), len(self.decoder.layers) + self.num_prediction_layers
        for name, tensor in without_layers(weights, range(first, last)):
            if name.endswith(self.buffers) or name.startswith(self.prediction_modules):
                continue
            if self.lm_head is None and name == HEAD:
                tied_head = lasting(tensor)
                continue
            if self.lm_head is None and name.startswith("lm_head."):
                raise CheckpointError(f"{name!r} is of a quantized head, {_BUT_TIED}", tensor=name)
            if self.lm_head is None and name == EMBEDDINGS:
                embedding = lasting(tensor)
            yield name, tensor
        if tied_head is not None and embedding is None:
            yield EMBEDDINGS, tied_head
        elif tied_head is not None and embedding is not None and not same_bytes(tied_head, embedding):
            raise CheckpointError(f"{HEAD} differs from {EMBEDDINGS}, {_BUT_TIED}")


_BUT_TIED = (
    "but the model was built with one table for both, as its config says (tie_word_embeddings); give "
    'hf_overrides={"tie_word_embeddings": False} to have a head of its own'
)
