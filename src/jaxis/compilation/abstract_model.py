"""A model without weights, as if it were loaded onto a mesh whose devices need not be present."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config import VllmConfig
from jaxis.config.quantization import HasQuantMethod
from jaxis.kernels.weights import WeightValue
from jaxis.kernels.weights.shards import in_equal_parts, placement
from jaxis.layers.module import HasAfterLoading, JaxModule, named_modules, named_parameters
from jaxis.layers.partial_weight import WeightLoader
from jaxis.models.model_loader import construct_model
from jaxis.models.registry import model_class_of
from jaxis.parallel.mesh import logical_sharding


def abstract_model(vllm_config: VllmConfig, mesh: jax.sharding.Mesh) -> JaxModule:
    """Constructs the model of a configuration; its parameters are ShapeDtypeStructs with their shardings on the mesh.

    Quantized weights have the types and shapes that loading gives them. Only config.json is read. Raises ConfigError if
    an architecture, or a value of config.json, is not supported.
    """
    model_class = model_class_of(vllm_config.model_config.hf_config)
    graphs: list[nnx.GraphDef[JaxModule]] = []

    def load() -> nnx.State:
        model = construct_model(model_class, vllm_config, mesh)
        _fill(model)
        graph, state = nnx.split(model)
        graphs.append(graph)
        return state

    with jax.set_mesh(mesh):
        state = jax.eval_shape(load)
    model = nnx.merge(graphs[-1], jax.tree.map(lambda leaf: _placed(leaf, mesh, None), state))
    with jax.set_mesh(mesh):
        for _, param in named_parameters(model):
            axes, value = param.get_metadata().get("logical_axes"), param.get_value()
            axes = placement(value, axes) if axes else None
            param.set_value(jax.tree.map(lambda leaf, axes=axes: _placed(leaf, mesh, axes), value))
    return model


def _fill(model: JaxModule) -> None:
    """Gives each parameter zeros of its loaded type and shape, and lets modules process them as after loading."""
    structs: dict[str, WeightValue | jax.ShapeDtypeStruct] = {}
    for _, param in named_parameters(model):
        loader = param.get_metadata().get("weight_loader")
        if isinstance(loader, WeightLoader):
            # Recipes compare equal, whatever they make; what they print does not.
            key = f"{loader.slot.shape} {loader.slot.axes} {loader.recipe!r}"
            if key not in structs:
                structs[key] = _example(loader)
            param.set_value(jax.tree.map(_zeros_of(loader), structs[key]))
    for module in {id(module): module for _, module in named_modules(model)}.values():
        if isinstance(module, HasQuantMethod) and module.quant_method is not None:
            module.quant_method.process_weights_after_loading(module)
        if isinstance(module, HasAfterLoading):
            module.after_loading()


def _example(loader: WeightLoader) -> WeightValue | jax.ShapeDtypeStruct:
    """Makes a weight as the loader would, with meaningless values; for a stack of experts, one expert's."""
    recipe, shape = loader.recipe, loader.slot.shape
    specs = recipe.format.tensors(shape)
    if recipe.scheme is None and set(specs) == {"weight"}:
        plain = jax.ShapeDtypeStruct(shape, loader.dtype)
        return jax.eval_shape(lambda array: in_equal_parts(array, loader.slot.axes), plain)
    return in_equal_parts(recipe.example(shape, loader.dtype), loader.slot.axes)


def _zeros_of(loader: WeightLoader) -> Callable[[Any], jax.Array]:
    leading = () if loader.slot.num_experts is None else (loader.slot.num_experts,)
    return lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype)


def _placed(leaf: Any, mesh: jax.sharding.Mesh, axes: tuple[str | None, ...] | None) -> jax.ShapeDtypeStruct:
    sharding = logical_sharding(mesh, axes if axes and len(axes) == len(leaf.shape) else None, leaf.shape)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
