"""Probes a model: records each module's inputs and outputs, or runs modules on the reference's inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.bringup.verify.compare import relative_error
from jaxis.bringup.verify.recording import LOGITS, ChosenExperts, ModuleCall, Recording, Values, as_shape, call_name
from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import JaxModule, calls_observed, named_modules


@dataclass(frozen=True)
class Event:
    """The begin or end of a module's call, in the run that follows the reference.

    Attributes:
      module: Dotted name in the checkpoint, as `call_name` numbers it.
      begins: True at the start of the call, with the `error` of its input; False at the end, with its output's.
      error: Relative error; None if there is nothing to compare with.
    """

    module: str
    begins: bool
    error: float | None


def record(model: JaxModule, token_ids: list[int]) -> Recording:
    """Runs one sequence without a cache; records modules by their names in the checkpoint, logits [T, V] as LOGITS."""
    calls: Recording = {}

    def observe(name: str, module: JaxModule, call: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = call(module, *args, **kwargs)
        calls[name] = ModuleCall(_values(args, kwargs), _values(_parts(result), {}), type(module))
        return result

    logits = _run(model, token_ids, observe)
    calls[LOGITS] = ModuleCall(Values(), Values(logits), type(model))
    return calls


class _Stopped(Exception):
    pass


def follow(
    model: JaxModule,
    token_ids: list[int],
    reference: Recording,
    tokens: float = 1.0,
    watch: Callable[[Event, np.ndarray | None, np.ndarray | None], bool] = lambda *_: False,
) -> list[Event]:
    """Runs one sequence like `record`, but gives each module the reference's input and continues with its output.

    An error within a module is then its own. An error between two modules belongs to the module that contains them. The
    `reference` has the names of this model's calls, and its logits; `tokens` is the share for `relative_error`. `watch`
    gets each event with jaxis's array and the reference's, where there are two, and ends the run if it returns True.
    """
    events: list[Event] = []

    def add(event: Event, ours: Values, expected: Values) -> None:
        events.append(event)
        pair = _pair(ours, expected)
        if watch(event, *(pair or (None, None))):
            raise _Stopped

    def observe(name: str, module: JaxModule, call: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if (expected := reference.get(name)) is None:
            return call(module, *args, **kwargs)
        given = [*args, *kwargs.values()]
        given, ours, error = _replace(given, expected.inputs, tokens)
        add(Event(name, True, error), ours, expected.inputs)
        result = call(module, *given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        replaced, ours, error = _replace(_parts(result), expected.outputs, tokens)
        add(Event(name, False, error), ours, expected.outputs)
        return tuple(replaced) if isinstance(result, tuple) else replaced[0]

    try:
        logits, expected = Values(_run(model, token_ids, observe)), reference[LOGITS].outputs
        add(Event(LOGITS, False, values_error(logits, expected, tokens)), logits, expected)
    except _Stopped:
        pass
    return events


def _run(model: JaxModule, token_ids: list[int], observe: Callable[..., Any]) -> np.ndarray:
    if not isinstance(model, GenerativeModel):
        raise TypeError(f"{type(model).__name__} has no compute_logits")
    known_as = checkpoint_names_of(model).name_in_checkpoint
    names = {id(module): known_as(name) for name, module in reversed([*named_modules(model)])}
    running: list[JaxModule] = []
    counts: Counter[str] = Counter()

    def observer(module: JaxModule, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A method that calls its base class's method is still in the same call.
        if (running and running[-1] is module) or id(module) not in names:
            return call(module, *args, **kwargs)
        running.append(module)
        counts[name := names[id(module)]] += 1
        try:
            return observe(call_name(name, counts[name]), module, call, list(args), kwargs)
        finally:
            running.pop()

    metadata = AttentionMetadata.for_whole_sequences([len(token_ids)])
    with calls_observed(observer):
        _, hidden, _ = model(None, jnp.asarray(token_ids, jnp.int32), metadata)
        return np.asarray(model.compute_logits(hidden), np.float32)


def _parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _values(args: list[Any], kwargs: dict[str, Any]) -> Values:
    return Values.of([_to_numpy(a) for a in (*args, *kwargs.values()) if isinstance(a, jax.Array)])


def _to_numpy(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float32 if jnp.issubdtype(array.dtype, jnp.floating) else None)


def _replace(items: list[Any], expected: Values, tokens: float) -> tuple[list[Any], Values, float | None]:
    """Replaces our arrays by the reference's where it has them; returns the items, ours, and the error between them."""
    items, errors = list(items), []
    ours = Values.of(arrays := [_to_numpy(item) for item in items if isinstance(item, jax.Array)])
    places = [i for i, item in enumerate(items) if isinstance(item, jax.Array)]

    def put(array: np.ndarray, replacement: np.ndarray) -> None:
        place = places[next(i for i, candidate in enumerate(arrays) if candidate is array)]
        items[place] = jnp.asarray(replacement, items[place].dtype)

    if ours.hidden is not None and (hidden := as_shape(expected.hidden, ours.hidden.shape)) is not None:
        errors.append(relative_error(ours.hidden, hidden, tokens))
        put(ours.hidden, hidden)
    if (routing := ours.routing) is not None:
        expected_routing = expected.as_routing(routing.expert_ids.shape[-1]).routing
        if expected_routing is not None:
            errors.append(_routing_error(routing, expected_routing, tokens))
            if routing.expert_ids.shape == expected_routing.expert_ids.shape:
                put(routing.expert_ids, expected_routing.expert_ids)
                put(routing.expert_weights, expected_routing.expert_weights)
    return items, ours, max(errors, default=None)


def values_error(actual: Values, expected: Values, tokens: float = 1.0) -> float | None:
    """Returns the relative error of all values that can be compared; None if there are none."""
    errors = []
    if actual.hidden is not None and (hidden := as_shape(expected.hidden, actual.hidden.shape)) is not None:
        errors.append(relative_error(actual.hidden, hidden, tokens))
    if (routing := actual.routing) is not None:
        expected_routing = expected.as_routing(routing.expert_ids.shape[-1]).routing
        if expected_routing is not None:
            errors.append(_routing_error(routing, expected_routing, tokens))
    return max(errors, default=None)


def _pair(ours: Values, expected: Values) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the arrays to compare in the same shape, of a router's choice the weight of each expert."""
    if ours.hidden is not None:
        theirs = as_shape(expected.hidden, ours.hidden.shape)
        return None if theirs is None else (ours.hidden, theirs)
    if (actual := ours.routing) is None:
        return None
    routing = expected.as_routing(actual.expert_ids.shape[-1]).routing
    return None if routing is None else _weights_of_each(actual, routing)


def _routing_error(actual: ChosenExperts, expected: ChosenExperts, tokens: float) -> float:
    """Returns the relative error of each expert's weight, regardless of the order of experts."""
    return relative_error(*_weights_of_each(actual, expected), tokens)


def _weights_of_each(actual: ChosenExperts, expected: ChosenExperts) -> tuple[np.ndarray, np.ndarray]:
    num_experts = 1 + max(int(actual.expert_ids.max()), int(expected.expert_ids.max()))
    return _weight_of_each(actual, num_experts), _weight_of_each(expected, num_experts)


def _weight_of_each(routing: ChosenExperts, num_experts: int) -> np.ndarray:
    """Returns the weight of every expert, f32 [T, X]."""
    weights = np.zeros((len(routing.expert_ids), num_experts), np.float32)
    np.put_along_axis(weights, routing.expert_ids.astype(np.int64), routing.expert_weights, axis=-1)
    return weights
