"""Loads a checkpoint folder into a model on its devices.

The class is first constructed abstractly, with shapes and types but no memory. Loading then gives each parameter its
value. A parameter that was not loaded stays abstract, so random weights cannot slip in.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from jaxis.config import VllmConfig
from jaxis.config.quantization import HasQuantMethod, HoldsWeights, QuantizationConfig, name_of_tensor, restored_tensor
from jaxis.errors import CheckpointError, ConfigError
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.experts import JaxExperts
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.module import (
    AbstractRngs,
    DeferredRngs,
    HasAfterLoading,
    JaxModule,
    UnusedRngs,
    initialize,
    named_modules,
    named_parameters,
)
from jaxis.layers.partial_weight import missing_tensors
from jaxis.layers.weight_loader import LoadsWeights, place_array
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.models.common.interfaces import DRAFT_PREFIX, has_tied_head
from jaxis.models.common.stage_model import cut_to_stage
from jaxis.models.common.tables import HEAD, with_both_tables
from jaxis.models.registry import model_class_of
from jaxis.parallel.equal_shares import check_experts
from jaxis.parallel.stages import WHOLE, Stage

MAX_NAMES_SHOWN = 5


class NamedTensors(Protocol):
    """Tensors by a checkpoint's names, as a context manager; `total_bytes` is 0 if unknown."""

    total_bytes: int

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once."""
        ...

    def __enter__(self) -> NamedTensors: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


def load_model(
    vllm_config: VllmConfig,
    mesh: jax.sharding.Mesh,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    model_class: type[Any] | None = None,
    stage: Stage = WHOLE,
    tensors: NamedTensors | None = None,
) -> JaxModule:
    """Loads the checkpoint's model (with `load_format="dummy"`, with random weights).

    Args:
      vllm_config: Configuration with the folder and the data type.
      mesh: Mesh of the devices that receive the weights.
      on_progress: Callback with (bytes read, total bytes) as tensors are consumed.
      model_class: Class of the model; None means that of config.json's `architectures`.
      stage: Pipeline stage to load.
      tensors: Weights of the model; None means those of the checkpoint.

    Raises:
      ConfigError: An architecture or config key is not supported, or the model cannot be divided into stages.
      CheckpointError: The tensors do not match the model's parameters.
    """
    hf_config = vllm_config.model_config.hf_config
    model_class = model_class or model_class_of(hf_config)

    def construct(rngs: type[nnx.Rngs]) -> JaxModule:
        model = construct_model(model_class, vllm_config, mesh, rngs)
        _check_experts(model, vllm_config, mesh)
        cut_to_stage(model, stage)
        return model

    with jax.set_mesh(mesh):
        if vllm_config.load_config.load_format == "dummy":
            # Parameters of other stages get no values.
            model = construct(DeferredRngs)
            _check_config(vllm_config, model_class)
            _place_initial_values(model)
        else:
            model = _construct_abstractly(construct)
            _check_config(vllm_config, model_class)
            if isinstance(vllm_config.quant_config, HoldsWeights):
                vllm_config.quant_config.fill(model)
                return model
            _load(model, vllm_config, on_progress, tensors)
        # A module may have two names.
        for name, module in {id(module): (name, module) for name, module in named_modules(model)}.values():
            if isinstance(module, HasQuantMethod) and module.quant_method is not None:
                try:
                    module.quant_method.process_weights_after_loading(module)
                except CheckpointError as error:
                    known_as = checkpoint_names_of(model).name_in_checkpoint(name)
                    raise CheckpointError(f"{vllm_config.model_config.model}: {known_as} {error}") from None
            # A module's own post-processing, after that of its method.
            if isinstance(module, HasAfterLoading):
                module.after_loading()
    return model


def construct_model(
    model_class: type[Any],
    vllm_config: VllmConfig,
    mesh: jax.sharding.Mesh | None = None,
    rngs: type[nnx.Rngs] = UnusedRngs,
) -> JaxModule:
    """Calls the constructor with those arguments of the contract that it declares; by default inside a trace.

    Raises ConfigError if it requires an argument that the contract does not have.
    """
    offered: dict[str, Callable[[], Any]] = {
        "vllm_config": lambda: vllm_config,
        "rng": lambda: rngs(vllm_config.model_config.seed),
        "quant_config": lambda: vllm_config.quant_config,
        "mesh": lambda: mesh,
    }
    return model_class(**_arguments_named_by(model_class.__init__, offered))


def construct_abstractly(
    vllm_config: VllmConfig,
    *,
    check_config: bool = True,
    model_class: type[Any] | None = None,
    stage: Stage = WHOLE,
) -> JaxModule:
    """Constructs the checkpoint's model, or its stage, without weights: parameters have shapes and types only.

    With `check_config`, unread keys and rules are errors; otherwise, see `HFConfig.unread_keys`. The default class is
    that of config.json's `architectures`. Raises ConfigError if an architecture, a config key or a quantization rule is
    not supported, or the model cannot be divided into stages.
    """
    model_class = model_class or model_class_of(vllm_config.model_config.hf_config)
    model = _construct_abstractly(lambda rngs: construct_model(model_class, vllm_config, rngs=rngs))
    cut_to_stage(model, stage)
    if check_config:
        _check_config(vllm_config, model_class)
    return model


def _arguments_named_by(function: Callable[..., Any], offered: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Returns the offered arguments that a function declares. Only these are made: a random key costs a program."""
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}
    for name, parameter in parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and name not in offered:
            raise ConfigError(
                f"{function.__qualname__} requires the argument {name!r}, which is not one of {', '.join(offered)}: "
                "rename it or give it a default"
            )
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {name: make() for name, make in offered.items()}
    return {name: make() for name, make in offered.items() if name in parameters}


def _construct_abstractly(construct: Callable[[type[nnx.Rngs]], JaxModule]) -> JaxModule:
    """Returns the model with abstract parameters; other arrays of the constructor (tables, random states) are real."""
    # Most constructors compute nothing, and then a trace is not needed; the error of any other shows again in a trace.
    with contextlib.suppress(Exception), jax.no_execution(True):
        model = construct(AbstractRngs)
        if not any(_has_arrays(module) for _, module in named_modules(model)):
            return model
    graphs: list[nnx.GraphDef[JaxModule]] = []

    def split() -> tuple[nnx.State, nnx.State]:
        graph, parameters, constants = nnx.split(construct(UnusedRngs), nnx.Param, ...)
        graphs.append(graph)
        return parameters, constants

    parameters, constants = jax.eval_shape(split)
    if jax.tree.leaves(constants):
        # Compiled, so that the parameters' initial values are never computed.
        constants = jax.jit(lambda: split()[1])()
    return nnx.merge(graphs[-1], parameters, constants)


def _has_arrays(module: nnx.Module) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(list(vars(module).values())))


def _check_config(vllm_config: VllmConfig, model_class: type[Any]) -> None:
    """Raises an error for config keys and quantization rules that the model did not read."""
    if vllm_config.quant_config is not None:
        vllm_config.quant_config.check_all_used()
    uses = vllm_config.model_config.hf_config.key_uses()
    unread = sorted((use for use in uses if use.use == "unread"), key=lambda use: use.key)
    if unread:
        reasons = ", ".join(f"{use.key} ({use.because})" for use in unread)
        overrides = ", ".join(f"{use.key!r}: None" for use in unread)
        raise ConfigError(
            f"config.json of {vllm_config.model_config.model} has keys that {model_class.__name__} does not know: "
            f"{reasons}. If they do not change the model, remove them or pass hf_overrides={{{overrides}}}"
        )


def _check_experts(model: JaxModule, vllm_config: VllmConfig, mesh: jax.sharding.Mesh) -> None:
    """Raises an error if experts are to be spread over devices and cannot be."""
    if not vllm_config.parallel_config.enable_expert_parallel:
        return
    layers = [module for _, module in named_modules(model) if isinstance(module, JaxExperts) and module.are_spread]
    if not layers:
        raise ConfigError(
            f"enable_expert_parallel: {vllm_config.model_config.model} has no experts that can be spread over devices: "
            "leave it out"
        )
    for layer in layers:
        check_experts(layer.num_experts, mesh.size)


def _load(
    model: JaxModule,
    vllm_config: VllmConfig,
    on_progress: Callable[[int, int], None] | None,
    tensors: NamedTensors | None,
) -> None:
    folder = vllm_config.model_config.model
    source = folder if tensors is None else "the given weights"
    load_weights = loader_of(model).load_weights
    # In the older model development guide, load_weights(rng) finds the files itself.
    offered: dict[str, Callable[[], Any]] = {"rng": lambda: jax.random.key(vllm_config.model_config.seed)}
    names, load_config = checkpoint_names_of(model), vllm_config.load_config
    changer = None
    if (changes := load_config.tensor_changes) is not None:
        is_tied = load_config.splits_tied or has_tied_head(model)
        changer = changes.begin(names.name_here, is_tied=is_tied)
    with tensors or open_checkpoint(folder) as checkpoint:
        stored = _tensors(checkpoint, vllm_config.quant_config, on_progress)
        if load_config.splits_tied:
            stored = with_both_tables(stored, names)
        weights = stored if changer is None else ((name, changer.changed(name, tensor)) for name, tensor in stored)
        offered["weights"] = lambda: weights
        arguments = _arguments_named_by(load_weights, offered)
        try:
            load_weights(**arguments)
            if "weights" in arguments and (unread := next(weights, None)) is not None:
                raise CheckpointError(f"tensor {unread[0]!r} was not read by {type(model).__name__}.load_weights")
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None
    if changer is not None:
        changer.check_all_used()
    missing = unfilled_parameters(model)
    if missing:
        shown = ", ".join(missing[:MAX_NAMES_SHOWN]) + (", ..." if len(missing) > MAX_NAMES_SHOWN else "")
        hint = ""
        if all(name.startswith(DRAFT_PREFIX) for name in missing):
            hint = "; these are of layers that predict later tokens: give files with them, or draft with method ngram"
        elif [names.name_here(name) for name in missing] == [HEAD]:
            hint = "; if the head is the embeddings, say so with hf_overrides={'tie_word_embeddings': True}"
        raise CheckpointError(
            f"{source}: {len(missing)} of the model's parameters are not in the checkpoint: {shown}{hint}"
        )


def _tensors(
    checkpoint: NamedTensors,
    quant_config: QuantizationConfig | None,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, np.ndarray]]:
    bytes_read = 0
    for name_in_file, tensor in checkpoint.iterate():
        if (name := name_of_tensor(quant_config, name_in_file)) is not None:
            yield name, restored_tensor(quant_config, name_in_file, tensor)
        bytes_read += tensor.nbytes
        if on_progress is not None:
            on_progress(bytes_read, checkpoint.total_bytes)


def loader_of(model: JaxModule) -> LoadsWeights:
    """Returns the model, or raises ConfigError if its class has no `load_weights`."""
    if not isinstance(model, LoadsWeights):
        raise ConfigError(
            f"{type(model).__name__} has no load_weights: inherit LoadableWithIterator, or write one "
            "(docs/adding-a-model.md)"
        )
    return model


def unfilled_parameters(model: nnx.Module) -> list[str]:
    """Returns the checkpoint's names of tensors that an abstractly constructed model still lacks."""
    names = checkpoint_names_of(model)
    unfilled = [(name, param) for name, param in named_parameters(model) if _is_abstract(param)]
    missing = [missing for name, param in unfilled for missing in missing_tensors(name, param)]
    missing += [name for name, each in named_modules(model) if isinstance(each, MappedTable) and not each.has_parts]
    return [names.name_in_checkpoint(name) for name in missing]


def _is_abstract(param: nnx.Param) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(param.get_value()))


def _place_initial_values(model: JaxModule) -> None:
    for _, param in named_parameters(model):
        initialize(param)
        # Values other than plain arrays are already placed.
        if isinstance(value := param.get_value(), jax.Array):
            param.set_value(place_array(value, param.get_metadata().get("logical_axes")))
