"""Looks for the cause of a divergence: changes of the faulty module, or of its result, that give the reference's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.bringup.verify.cause import Cause, CauseCode
from jaxis.bringup.verify.compare import Gates, relative_error
from jaxis.bringup.verify.partial_causes import causes_in_parts
from jaxis.bringup.verify.probe import Event, follow
from jaxis.bringup.verify.recording import LOGITS, Recording, as_shape, module_of
from jaxis.config.attention_span import AttentionSpan
from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.glu import GLU
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import ACTIVATIONS
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.qkv_packing import QKVPacking
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.routing import Routing

_ACTIVATIONS = {function: name for name, function in reversed(ACTIVATIONS.items())}  # each once
_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12)
_ROUNDING = 2.0**-8  # relative; of bfloat16
_MOST_FEATURES = 16384  # of a result whose features are looked for one by one


@dataclass(frozen=True)
class _Trial:
    """A cause, and the attributes of an object that would then be right."""

    cause: Cause
    changed: object
    attributes: Mapping[str, Any]


def find_causes(
    model: JaxModule, token_ids: Sequence[int], reference: Recording, name: str, gates: Gates
) -> tuple[Cause, ...]:
    """Returns the causes that explain the first divergence of a run, which is the fault of module `name`.

    Each trial changes one thing in the module, such as RoPE's pairing, and repeats the run up to the divergence. If
    none helps, the result itself is compared: scaled, permuted, or another sum of the same terms.
    """
    run = _Run(model, list(token_ids), reference, gates)
    fault = run.first_fault()
    if fault is None:
        return ()
    known_as = checkpoint_names_of(model).name_in_checkpoint
    modules = {known_as(path): module for path, module in named_modules(model)}
    module = modules.get(module_of(name), model)
    others = [other for other in modules.values() if type(other) is type(module) and other is not module]
    for trials in (_trials(module), _kind_trials(module, others)):
        if found := [trial.cause for trial in trials if run.is_right_with(fault, trial)]:
            return tuple(found)
    return tuple(_causes_in_values(fault, reference, name, gates.module_error))


@dataclass(frozen=True)
class _Fault:
    """The first event that is off, with jaxis's array and the reference's, and the events before it."""

    event: Event
    ours: np.ndarray | None
    theirs: np.ndarray | None
    before: tuple[Event, ...]


class _Run:
    """Runs that follow the reference, up to one event."""

    def __init__(self, model: JaxModule, token_ids: list[int], reference: Recording, gates: Gates) -> None:
        self._model, self._token_ids, self._reference, self._gates = model, token_ids, reference, gates

    def first_fault(self) -> _Fault | None:
        found: list[_Fault] = []
        before: list[Event] = []

        def watch(event: Event, ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
            if event.error is not None and event.error > self._gates.module_error:
                found.append(_Fault(event, ours, theirs, tuple(before)))
            before.append(event)
            return bool(found)

        self._follow(watch)
        return found[0] if found else None

    def is_right_with(self, fault: _Fault, trial: _Trial) -> bool:
        """Returns whether nothing is off up to the fault's event once the trial's attributes are set."""
        right = False

        def watch(event: Event, _ours: np.ndarray | None, _theirs: np.ndarray | None) -> bool:
            nonlocal right
            is_off = event.error is not None and not event.error <= self._gates.module_error
            is_there = (event.module, event.begins) == (fault.event.module, fault.event.begins)
            right = is_there and not is_off
            return is_off or is_there

        before = {name: getattr(trial.changed, name) for name in trial.attributes}
        try:
            for name, value in trial.attributes.items():
                old = before[name]
                is_array = isinstance(old, nnx.Variable) and value is not None
                setattr(trial.changed, name, old.replace(value) if is_array else value)
            self._follow(watch)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
            return False  # the module cannot run so
        finally:
            for name, old in before.items():
                setattr(trial.changed, name, old)
        return right

    def _follow(self, watch: Callable[[Event, np.ndarray | None, np.ndarray | None], bool]) -> None:
        follow(self._model, self._token_ids, self._reference, self._gates.module_tokens, watch)


def _trials(module: nnx.Module) -> Iterator[_Trial]:
    """Yields mistakes that are usual in a module with such attributes, each with the attributes that mend it."""
    for name, tries in _TRIES.items():
        if (value := vars(module).get(name)) is not None:
            for code, message, other in tries(value, module):
                yield _Trial(Cause(code, message), module, {name: other})


def _kind_trials(module: nnx.Module, others: Sequence[nnx.Module]) -> Iterator[_Trial]:
    """Yields the settings of the first other layer that has others."""
    for other in others:
        changes = {name: vars(other)[name] for name in _OF_THE_KIND if _differs(module, other, name)}
        if changes:
            message = f"the reference's layer has {', '.join(changes)} of jaxis's other kind of layer"
            yield _Trial(Cause("layer_kind", message), module, changes)
            return


def _differs(module: nnx.Module, other: nnx.Module, name: str) -> bool:
    if name not in vars(module) or name not in vars(other):
        return False
    return bool(vars(module)[name] != vars(other)[name])


_Tries = Iterator[tuple[CauseCode, str, Any]]


def _other_ropes(rope: RotaryEmbedding, _: nnx.Module) -> _Tries:
    pairs = "dimensions of both halves" if rope.interleaved else "neighbouring dimensions"
    other = dataclasses.replace(rope, interleaved=not rope.interleaved)
    yield "rope_pairing", f"the reference's RoPE pairs {pairs}", other
    frequencies = tuple(-frequency for frequency in rope.inv_freq)
    yield (
        "rope_direction",
        "the reference's RoPE rotates the other way",
        dataclasses.replace(rope, inv_freq=frequencies),
    )
    yield "no_rope", "the reference applies no RoPE in this layer", None
    frequencies = np.asarray(rope.inv_freq)
    for part in (2, 4):
        message = f"the reference rotates {rope.rotary_dim // part} of {rope.rotary_dim} dimensions"
        yield "rope_dims", message, dataclasses.replace(rope, inv_freq=tuple(frequencies[::part].tolist()))
    if len(frequencies) > 1:
        exponents = np.arange(2 * len(frequencies)) / 2
        doubled = frequencies[0] * (frequencies[1] / frequencies[0]) ** exponents
        message = f"the reference rotates {2 * rope.rotary_dim} dimensions, jaxis {rope.rotary_dim}"
        yield "rope_dims", message, dataclasses.replace(rope, inv_freq=tuple(doubled.tolist()))


def _other_packings(_: QKVPacking, module: nnx.Module) -> _Tries:
    for num_parts, name in ((1, "all queries first"), (vars(module).get("num_kv_heads", 1), "head by head")):
        for values_first in (False, True):
            order = "values, keys" if values_first else "keys, values"
            message = f"the reference packs queries, {order}, {name}"
            yield "packing", message, QKVPacking(num_parts, values_first)


def _other_scales(_: float, module: nnx.Module) -> _Tries:
    sizes = {"the head size": vars(module).get("head_dim")}
    if isinstance(projection := vars(module).get("q_proj"), JaxLinear):
        sizes["the hidden size"] = projection.input_size
    for name, size in sizes.items():
        if size:
            yield "attention_scale", f"the reference scales scores by {name} ** -0.5", size**-0.5
    yield "attention_scale", "the reference does not scale scores", 1.0


def _other_spans(span: AttentionSpan, _: nnx.Module) -> _Tries:
    for field in ("sliding_window", "attention_chunk_size"):
        if (size := getattr(span, field)) is not None:
            for other in (size - 1, size + 1, None):
                message = f"the reference's {field} is {other} where jaxis has {size}"
                yield "window", message, dataclasses.replace(span, **{field: other})


def _other_weights(weight: nnx.Variable, module: nnx.Module) -> _Tries:
    if isinstance(module, JaxLinear) and module.input_size == module.output_size:
        yield "transposed", "the reference multiplies by the transposed weight", weight[...].T


def _other_routings(routing: Routing, _: nnx.Module) -> _Tries:
    other_sum = {"renormalize": not routing.renormalize}
    other_group = {"group_score": "max" if routing.group_score == "top2_sum" else "top2_sum"}
    no_groups = {"num_groups": 1, "num_allowed_groups": 1}
    functions = [{"score_function": function} for function in ("softmax", "sigmoid")]
    both = [function | other_sum for function in functions]
    allowed = [{"num_allowed_groups": number} for number in range(1, routing.num_groups)]
    for changes in (other_sum, {"scaling_factor": 1.0}, no_groups, other_group, *allowed, *functions, *both):
        said = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        with contextlib.suppress(ConfigError):  # too few experts to choose from
            yield "routing", f"the reference routes with {said}", dataclasses.replace(routing, **changes)


def _other_activations(*_: object) -> _Tries:
    for function, name in _ACTIVATIONS.items():
        yield "activation", f"the reference's activation is {name}", function


def _other_units(*_: object) -> _Tries:
    for code, message, function in _other_activations():
        yield code, message, GLU(function)


def _no_sinks(*_: object) -> _Tries:
    yield "sinks", "the reference has no sinks", None


def _other_offset(offset: bool, _: nnx.Module) -> _Tries:
    yield "unit_offset", f"the reference multiplies by {'weight' if offset else '1 + weight'}", not offset


_OF_THE_KIND = ("rope", "span", "scale", "query_scale")
"""Attributes in which kinds of attention layers of one model differ."""
_TRIES: dict[str, Callable[[Any, nnx.Module], _Tries]] = {
    "rope": _other_ropes,
    "scale": _other_scales,
    "span": _other_spans,
    "sinks": _no_sinks,
    "weight": _other_weights,
    "epsilon": lambda *_: (("epsilon", f"the reference's epsilon is {value:g}", value) for value in _EPSILONS),
    "add_unit_offset": _other_offset,
    "activation": _other_activations,
    "act_fn": _other_activations,
    "gated_unit": _other_units,
    "packing": _other_packings,
    "routing": _other_routings,
}
"""Attribute of a module -> (code, message, other value) of the usual mistakes in it."""


def _causes_in_values(fault: _Fault, reference: Recording, name: str, limit: float) -> Iterator[Cause]:
    """Yields causes that the arrays show, the simplest alone."""
    ours, theirs = fault.ours, fault.theirs
    if ours is None or theirs is None or not np.isfinite(ours).all():
        return

    def is_right(candidate: np.ndarray) -> bool:
        return relative_error(candidate, theirs) <= limit

    factor = float((ours * theirs).sum() / max(float((ours * ours).sum()), 1e-30))
    added = (theirs - ours).mean(0)
    if is_right(factor * ours):
        yield Cause("scale", f"the reference's is {factor:.6g} times jaxis's")
    elif is_right(ours + added):
        yield Cause("missing_bias", "the reference's is the same for every token plus one vector: a bias")
    elif (cap := _soft_cap(ours, theirs)) is not None and is_right(cap * np.tanh(ours / cap)):
        yield Cause("soft_cap", f"the reference caps it: {cap:.6g} * tanh(x / {cap:.6g})")
    elif (order := _order(ours, theirs, limit)) is not None:
        yield Cause("permuted", f"the reference has the same features in another order: {order}")
    elif _exchanged(fault, reference, name, is_right):
        yield Cause("gate_and_up", "the reference applies the activation to the other one of gate_proj and up_proj")
    elif (sums := _sums(fault, reference, name)) is not None:
        yield Cause("residual", sums)
    elif fault.event.error is not None and fault.event.error < _ROUNDING:
        yield Cause("rounding", "it is as small as a rounding to bfloat16 on one side")
    else:
        yield from causes_in_parts(
            ours, theirs, None if fault.event.begins else reference.get(fault.event.module), limit
        )


def _soft_cap(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """Returns the c of `c * tanh(ours / c)` that gives the reference's largest value; None without one."""
    place = np.unravel_index(np.abs(ours).argmax(), ours.shape)
    value, capped = abs(float(ours[place])), abs(float(theirs[place]))
    if not 0 < capped < value:
        return None
    low, high = capped, 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if middle * np.tanh(value / middle) < capped else (low, middle)
    return high


def _order(ours: np.ndarray, theirs: np.ndarray, limit: float) -> str | None:
    """Describes the permutation of features that gives the reference's; None if there is none."""
    ours, theirs = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    if ours.shape[1] > _MOST_FEATURES:
        return None
    # Features are told by two projections of their columns, sorted, instead of by comparing each pair.
    keys = [np.random.default_rng(0).standard_normal(len(ours)) @ array for array in (ours, theirs)]
    from_ours, from_theirs = (np.argsort(key, kind="stable") for key in keys)
    order = np.empty_like(from_ours)
    order[from_theirs] = from_ours
    if relative_error(ours[:, order], theirs) > limit:
        return None
    starts = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), len(order)]
    runs = [f"{order[a]}..{order[b - 1]}" for a, b in itertools.pairwise(starts)]
    return ", ".join(runs[:4]) + (", ..." if len(runs) > 4 else "")


def _exchanged(fault: _Fault, reference: Recording, name: str, is_right: Callable[[np.ndarray], bool]) -> bool:
    """Returns whether the reference's `down_proj` gets what jaxis would give it with gate and up exchanged."""
    calls = [reference.get(f"{name}.{part}") for part in ("gate_proj", "up_proj")]
    if fault.ours is None or not fault.event.begins or None in calls:
        return False
    gate, up = (as_shape(call.outputs.hidden, fault.ours.shape) for call in calls if call is not None)
    if gate is None or up is None:
        return False
    gate, up = jnp.asarray(gate), jnp.asarray(up)
    for activation in _ACTIVATIONS:
        usual, exchanged = np.asarray(activation(gate) * up), np.asarray(activation(up) * gate)
        if relative_error(exchanged, fault.ours) < _ROUNDING and is_right(usual):
            return True
    return False


def _sums(fault: _Fault, reference: Recording, name: str) -> str | None:
    """Describes both sides as sums of the module's input and its submodules' outputs; None if the reference is none."""
    assert fault.ours is not None
    assert fault.theirs is not None
    shape = fault.theirs.shape
    prefix = "" if name not in reference else f"{name}."
    terms = {} if name not in reference else {"its input": as_shape(reference[name].inputs.hidden, shape)}
    for event in fault.before:
        inside = event.module.removeprefix(prefix)
        if not event.begins and event.module.startswith(prefix) and (not prefix or "." not in inside):
            terms[inside] = as_shape(reference[event.module].outputs.hidden, shape)
    known = {term: values for term, values in terms.items() if values is not None}
    if not known or name == LOGITS:
        return None
    basis = np.stack([values.ravel() for values in known.values()], axis=1).astype(np.float64)

    def sum_of(values: np.ndarray) -> str | None:
        factors = np.linalg.lstsq(basis, values.ravel().astype(np.float64), rcond=None)[0]
        if relative_error((basis @ factors).reshape(shape), values) > 1e-3:
            return None
        parts = [f"{factor:.4g} * {term}" for factor, term in zip(factors, known, strict=True) if abs(factor) > 1e-3]
        return " + ".join(parts) or "0"

    theirs = sum_of(fault.theirs)
    if theirs is None:
        return None
    ours = sum_of(fault.ours)
    return f"the reference has {theirs}" + (f", jaxis {ours}" if ours else "")
