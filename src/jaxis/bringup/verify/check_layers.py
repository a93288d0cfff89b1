"""Compares every module with the reference's of the same name, and finds the one at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxis.bringup.verify.compare import Gates
from jaxis.bringup.verify.probe import Event, follow, record, values_error
from jaxis.bringup.verify.recording import LOGITS, Recording
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import JaxModule, named_modules, named_parameters


@dataclass(frozen=True)
class ModuleComparison:
    """The errors of one module. They are relative; None if there is nothing to compare.

    Attributes:
      name: Dotted name of the module.
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
      module: Dotted name.
      where: What differs: its output, or the input that it passes to a submodule.
      own_error: Relative error of that, given the reference's values before it.
      error_before, error_after: Relative errors of its input and output in the chain; None where not comparable.
      not_called: Submodules that the reference calls and jaxis does not.
      not_compared: Submodules without a comparable counterpart in the reference, any of which may be at fault.
    """

    module: str
    where: str
    own_error: float
    error_before: float | None
    error_after: float | None
    not_called: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.module}: {self.where} is off by {self.own_error:.1e} when all before it is right"
        text += f"; in the chain, {_error(self.error_before)} before it and {_error(self.error_after)} after it"
        for what, names in (("not called", self.not_called), ("not compared", self.not_compared)):
            text += f"; {what}: {', '.join(names)}" if names else ""
        return text


@dataclass(frozen=True)
class LayersCheck:
    """Every module of one run.

    Attributes:
      num_tokens: Length of the sequence.
      limit: Maximum allowed `own_error`.
      modules: In the order in which their calls ended.
      divergence: None if there is none.
      unmatched: Modules that jaxis called and that match nothing in the reference.
      not_called: Modules with weights that the reference called and jaxis did not.
    """

    num_tokens: int
    limit: float
    modules: tuple[ModuleComparison, ...]
    divergence: Divergence | None
    unmatched: tuple[str, ...]
    not_called: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return self.divergence is None

    @property
    def num_compared(self) -> int:
        return sum(module.own_error is not None for module in self.modules)


def check_layers(model: JaxModule, token_ids: Sequence[int], reference: Recording, gates: Gates) -> LayersCheck:
    """Compares every module of one run without a cache.

    Args:
      model: Loaded with the reference's weights.
      token_ids: One sequence.
      reference: The reference's calls for it.
      gates: `module_error` and `module_tokens` apply.
    """
    token_ids = list(token_ids)
    calls = record(model, token_ids)
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
    known_as = checkpoint_names_of(model).name_in_checkpoint
    ours = {known_as(name) for name, module in named_modules(model) if any(True for _ in named_parameters(module))}
    not_called = tuple(name for name in reference if name in ours and name not in calls)
    return LayersCheck(
        num_tokens=len(token_ids),
        limit=gates.module_error,
        modules=tuple(modules),
        divergence=_first_divergence(events, modules, not_called, gates.module_error),
        unmatched=tuple(name for name in calls if name and name not in reference),
        not_called=not_called,
    )


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
            if last is not None and not last[1]:
                module, where = last[0], "its output, as far as what follows shows,"
            elif event.begins:
                module = enclosing
                where = f"what it gives {_inside(event.module, module)}" + (
                    f" after {_inside(last[0], module)}" if last and last[0].startswith(f"{module}.") else ""
                )
            else:
                module, where = event.module, "its output"
            chain = next((m for m in modules if m.name == module), None)
            return Divergence(
                module=module,
                where=where,
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


def _names_inside(module: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_inside(name, module) for name in names if name.startswith(f"{module}."))


def _inside(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.")


def _error(error: float | None) -> str:
    return "nothing to compare" if error is None else f"{error:.1e}"
