"""Compares every module with the reference's of the same name, and finds the one at fault."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxis.bringup.verify.cause import Cause
from jaxis.bringup.verify.causes import find_causes
from jaxis.bringup.verify.code_lines import code_of
from jaxis.bringup.verify.compare import Gates
from jaxis.bringup.verify.probe import Event, follow, record, values_error
from jaxis.bringup.verify.recording import LOGITS, ModuleCall, Recording, call_name, module_of
from jaxis.layers.checkpoint_names import CheckpointNames, checkpoint_names_of
from jaxis.layers.module import JaxModule, named_modules

_MOST_NAMES = 6  # in a line


@dataclass(frozen=True)
class ModuleComparison:
    """Relative errors of one module; None where there is nothing to compare.

    Attributes:
      input_error, output_error: Errors in the chain, where all modules before it are jaxis's.
      own_error: Error of its output when every module gets the reference's input and is replaced by its output.
    """

    name: str
    input_error: float | None
    output_error: float | None
    own_error: float | None


@dataclass(frozen=True)
class Divergence:
    """The first module that is at fault.

    Attributes:
      code: "own_output", or "between_children": the input that the module passes to a submodule.
      module: Dotted name; from its second call on with "#" and the number.
      after, before: Submodules around the fault, if it is between two; None otherwise.
      own_error: Relative error of that output or input, given the reference's values before it.
      error_before, error_after: Relative errors of its input and output in the chain; None where not comparable.
      not_called: Submodules in `LayersCheck.not_called`.
      not_compared: Submodules without a comparable counterpart in the reference, any of which may be at fault.
      causes: Changes, each of which makes it right.
      our_code, reference_code: Places, "FILE:FIRST-LAST", of the code that computes the module; of a class that
        inherits its computation, the class first.
    """

    code: Literal["own_output", "between_children"]
    module: str
    where: str
    after: str | None
    before: str | None
    own_error: float
    error_before: float | None
    error_after: float | None
    not_called: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    our_code: tuple[str, ...] = ()
    reference_code: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.module}: {self.where} is off by {self.own_error:.1e} when all before it is right"
        text += f"; in the chain, {_error(self.error_before)} before it and {_error(self.error_after)} after it"
        for what, names in (("not called", self.not_called), ("not compared", self.not_compared)):
            text += f"; {what}: {', '.join(names)}" if names else ""
        return text + "".join(f"; {cause.code}: {cause.message}" for cause in self.causes)


@dataclass(frozen=True)
class LayersCheck:
    """Every module of one run.

    Attributes:
      limit: Largest allowed `own_error`.
      modules: Modules in the order in which their calls ended.
      unmatched: Modules that jaxis called and that match nothing in the reference.
      not_called: Modules that the reference called and jaxis did not: modules of jaxis's model, and norms without
        weights, which nothing else misses.
      call_counts: Modules with different numbers of calls -> the reference's number and jaxis's. Their calls are
        compared with those of the nearest inputs, in order.
    """

    num_tokens: int
    limit: float
    modules: tuple[ModuleComparison, ...]
    divergence: Divergence | None
    unmatched: tuple[str, ...]
    not_called: tuple[str, ...]
    call_counts: Mapping[str, tuple[int, int]]

    @property
    def passed(self) -> bool:
        return self.divergence is None

    @property
    def num_compared(self) -> int:
        return sum(module.own_error is not None for module in self.modules)

    @property
    def worst_error(self) -> float:
        """The largest error that `limit` applies to: the fault's, if there is one."""
        errors = [module.own_error for module in self.modules if module.own_error is not None]
        return max([0.0, *errors] if self.divergence is None else [self.divergence.own_error, *errors])

    def notes(self) -> list[str]:
        """Describes differences in the modules themselves, which no error shows, one line each."""
        notes = [
            f"the reference calls {name} {_times(theirs)}, jaxis {_times(ours)}"
            for name, (theirs, ours) in self.call_counts.items()
        ]
        if self.unmatched:
            notes.append(f"not compared, since the reference has no module of the name: {_some(self.unmatched)}")
        if self.not_called and (self.divergence is not None or self.call_counts):
            notes.append(f"the reference calls and jaxis does not: {_some(self.not_called)}")
        return notes


def check_layers(model: JaxModule, token_ids: Sequence[int], reference: Recording, gates: Gates) -> LayersCheck:
    """Compares every module of one run without a cache with the reference's calls for the same sequence.

    The model has the reference's weights. Of the gates, `module_error` and `module_tokens` apply.
    """
    token_ids = list(token_ids)
    reference = _in_our_spelling(reference, checkpoint_names_of(model))
    calls = record(model, token_ids)
    call_counts = _call_counts(calls, reference)
    theirs, pairs = reference, _pairs(calls, reference, call_counts)
    reference = {ours: theirs[name] for ours, name in pairs.items()}
    events = follow(model, token_ids, reference, gates.module_tokens)
    own_errors = {event.module: event.error for event in events if not event.begins}
    modules = []
    for name, call in calls.items():
        if name and (expected := reference.get(name)) is not None:
            comparison = ModuleComparison(
                name,
                input_error=values_error(call.inputs, expected.inputs, gates.module_tokens),
                output_error=values_error(call.outputs, expected.outputs, gates.module_tokens),
                own_error=own_errors.get(name),
            )
            modules.append(comparison)
    not_called = _not_called(model, calls, theirs)
    divergence = _first_divergence(events, modules, not_called, gates.module_error)
    if divergence is not None:
        causes = find_causes(model, token_ids, reference, divergence.module, gates)
        causes = causes or _causes_in_calls(divergence, calls, theirs)
        ours, others = code_of(divergence.module, calls, reference | theirs)
        divergence = dataclasses.replace(divergence, causes=causes, our_code=ours, reference_code=others)
    return LayersCheck(
        num_tokens=len(token_ids),
        limit=gates.module_error,
        modules=tuple(modules),
        divergence=divergence,
        unmatched=tuple(
            name for name in calls if name and name not in reference and module_of(name) not in call_counts
        ),
        not_called=not_called,
        call_counts=call_counts,
    )


def _in_our_spelling(calls: Recording, names: CheckpointNames) -> Recording:
    """Returns the calls with one name for a module that files may name in several ways."""

    def spelled(call: str) -> str:
        module = module_of(call)
        return names.name_in_checkpoint(names.name_here(module)) + call.removeprefix(module)

    return {spelled(name): call for name, call in calls.items()}


def _call_counts(ours: Recording, theirs: Recording) -> dict[str, tuple[int, int]]:
    """Maps modules with different numbers of calls to the reference's number and ours."""
    counts = Counter(map(module_of, theirs)), Counter(map(module_of, ours))
    return {name: (counts[0][name], counts[1][name]) for name in counts[1] if 0 < counts[0][name] != counts[1][name]}


def _pairs(ours: Recording, theirs: Recording, call_counts: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Maps our calls to the reference's that they are compared with: the n-th to the n-th if both have as many."""
    pairs = {name: name for name in ours if name in theirs and module_of(name) not in call_counts}
    for module, (num_theirs, num_ours) in call_counts.items():
        first = 1
        for number in range(1, min(num_ours, num_theirs) + 1):
            call, last = ours[call_name(module, number)], num_theirs - max(min(num_ours, num_theirs) - number, 0)

            def error(n: int, module: str = module, call: ModuleCall = call) -> float:
                found = values_error(call.inputs, theirs[call_name(module, n)].inputs)
                return math.inf if found is None else found

            nearest = min(range(first, last + 1), key=error)
            pairs[call_name(module, number)] = call_name(module, nearest)
            first = nearest + 1
    return pairs


def _not_called(model: JaxModule, calls: Recording, theirs: Recording) -> tuple[str, ...]:
    known_as = checkpoint_names_of(model).name_in_checkpoint
    ours = {known_as(name) for name, _ in named_modules(model)}

    def is_missed(name: str) -> bool:
        return name in ours or "norm" in name.rpartition(".")[2]

    return tuple(name for name in dict.fromkeys(map(module_of, theirs)) if name not in calls and is_missed(name))


def _first_divergence(
    events: Sequence[Event], modules: Sequence[ModuleComparison], not_called: Sequence[str], limit: float
) -> Divergence | None:
    running: list[str] = []
    # The position in the run: the last module, and whether it could be compared.
    last: tuple[str, bool] | None = None
    for event in events:
        if event.begins:
            enclosing = running[-1] if running else "the model"
            running.append(event.module)
        elif event.module != LOGITS:
            running.pop()
        if event.error is not None and event.error > limit:
            after = before = None
            if last is not None and not last[1]:
                code, module, where = "own_output", last[0], "its output, as far as what follows shows,"
            elif event.begins:
                code, module, before = "between_children", enclosing, _inside(event.module, enclosing)
                if last and last[0].startswith(f"{module_of(module)}."):
                    after = _inside(last[0], module)
                where = f"what it gives {before}" + (f" after {after}" if after else "")
            else:
                code, module, where = "own_output", event.module, "its output"
            chain = next((m for m in modules if m.name == module), None)
            return Divergence(
                code=code,
                module=module,
                where=where,
                after=after,
                before=before,
                own_error=event.error,
                error_before=None if chain is None else chain.input_error,
                error_after=None if chain is None else chain.output_error,
                not_called=_names_inside(module, not_called),
                not_compared=_names_inside(module, [m.name for m in modules if m.own_error is None]),
            )
        if not event.begins:
            last = (event.module, event.error is not None)
        elif event.error is not None:
            last = None
    return None


def _causes_in_calls(divergence: Divergence, ours: Recording, theirs: Recording) -> tuple[Cause, ...]:
    """Returns the submodules of the faulty module that are not called, or the other order of its calls."""
    if divergence.not_called:
        return (Cause("not_called", f"the reference calls {_some(divergence.not_called)}"),)

    def children(calls: Recording) -> list[str]:
        names = [_inside(name, divergence.module) for name in calls if name.startswith(f"{divergence.module}.")]
        return [name for name in names if "." not in name]

    both = set(children(ours)) & set(children(theirs))
    orders = [[name for name in children(calls) if name in both] for calls in (ours, theirs)]
    if divergence.code == "between_children" and orders[0] != orders[1]:
        return (
            Cause("call_order", f"the reference calls {_some(orders[1])}, in this order; jaxis {_some(orders[0])}"),
        )
    return ()


def _names_inside(module: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_inside(name, module) for name in names if name.startswith(f"{module_of(module)}."))


def _inside(name: str, module: str) -> str:
    return name.removeprefix(f"{module_of(module)}.")


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


def _error(error: float | None) -> str:
    return "nothing to compare" if error is None else f"{error:.1e}"
