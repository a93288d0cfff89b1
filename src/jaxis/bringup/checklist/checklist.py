"""The bring-up checklist of a model, ticked from evidence that is gathered while the report is made."""

from __future__ import annotations

import dataclasses
import inspect
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jax

from jaxis.bringup.analyze.analysis import Analysis, analyze
from jaxis.bringup.analyze.module_tree import ModuleRow
from jaxis.bringup.checklist.round_trips import RoundTrip, round_trips
from jaxis.bringup.verify.reference import Reference
from jaxis.bringup.verify.shrink import tiny_twin
from jaxis.bringup.verify.source import find_source
from jaxis.bringup.verify.verify import VerifyResult, verify
from jaxis.errors import ConfigError
from jaxis.host.json_object import json_object_text
from jaxis.host.machine import cpu_model
from jaxis.models.registry import get_model_class

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ChecklistItem:
    """One item of the checklist: a requirement, the observations that show it, and the commands that reproduce them."""

    title: str
    passed: bool
    evidence: tuple[str, ...]
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The result of `jaxis report`, with its evidence; the tiny twin was converted. `made_at` is in UTC."""

    model: str
    made_at: str
    machine: str
    items: tuple[ChecklistItem, ...]
    analysis: Analysis
    verifications: tuple[VerifyResult, ...]
    conversions: tuple[RoundTrip, ...]

    @property
    def passed(self) -> bool:
        return all(item.passed for item in self.items)

    def to_json(self) -> str:
        found = {
            "passed": self.passed,
            "model": self.model,
            "made_at": self.made_at,
            "machine": self.machine,
            "checklist": [dataclasses.asdict(item) for item in self.items],
            "analysis": json.loads(self.analysis.to_json()),
            "verifications": [result.to_dict() for result in self.verifications],
            "conversions": [{"passed": trip.passed, **dataclasses.asdict(trip)} for trip in self.conversions],
        }
        return json_object_text(found)


def make_report(model: str, *, revision: str | None = None, on_stage: Callable[[str], None] = lambda _: None) -> Report:
    """Analyses, verifies and converts a model.

    Without weights, its tiny twin is verified. The twin, which has a tensor of every kind, is converted to Orbax and
    back. `on_stage` is called with a short description of each stage as it begins.

    Raises:
      ConfigError: jaxis cannot run the model, or transformers is missing or does not know it.
      CheckpointError: The checkpoint cannot be read.
    """
    on_stage("analysing")
    analysis = analyze(model, revision=revision)
    if not analysis.can_run:
        raise ConfigError(
            f"{model} cannot run, so there is nothing to prove: {analysis.findings[0]}; jaxis analyze says more"
        )
    source = find_source(model, revision=revision)
    with tempfile.TemporaryDirectory(prefix="jaxis_report_") as scratch:
        twin = Path(scratch, "twin")
        config = tiny_twin(source.config)
        Reference.random(config).save(twin, config)
        subject = str(source.folder or twin)
        verifications = []
        for dtype in DTYPES:
            result = verify(subject, dtype=dtype, on_stage=lambda stage, dtype=dtype: on_stage(f"{dtype}: {stage}"))
            weights = result.weights if source.folder is not None else "tiny twin"
            verifications.append(dataclasses.replace(result, model=model, weights=weights))
        on_stage("converting there and back")
        conversions = round_trips(twin)
    # What was verified and converted had no mesh: it ran on JAX's default devices.
    return Report(
        model=model,
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        machine=f"{cpu_model()}, {jax.default_backend()} backend, {platform.system()} {platform.machine()}",
        items=tuple(_checklist(model, analysis, verifications, conversions)),
        analysis=analysis,
        verifications=tuple(verifications),
        conversions=tuple(conversions),
    )


def _checklist(
    model: str, analysis: Analysis, verifications: Sequence[VerifyResult], conversions: Sequence[RoundTrip]
) -> list[ChecklistItem]:
    verify_commands = tuple(f"jaxis verify {model} --dtype {result.dtype}" for result in verifications)
    return [
        _architecture(model, analysis),
        _features(model, analysis),
        _conversion(model, analysis, conversions),
        _modules(verifications, verify_commands),
        _logits(verifications, verify_commands),
        _decoding(verifications, verify_commands),
        _documentation(model, analysis),
    ]


def _architecture(model: str, analysis: Analysis) -> ChecklistItem:
    unknown = [key.key for key in analysis.keys if key.use in ("refused", "unread")]
    evidence = [f"{row.name}: {', '.join([row.module, *row.settings])}" for row in _told(analysis) if row.settings]
    evidence.append(
        f"{len(analysis.keys)} keys of config.json, of which not accounted for: {', '.join(unknown) or 'none'}"
    )
    return ChecklistItem("Architecture analysis", not unknown, tuple(evidence), (f"jaxis analyze {model}",))


def _features(model: str, analysis: Analysis) -> ChecklistItem:
    model_class = get_model_class(list(analysis.architectures))
    modules = dict.fromkeys(row.module for row in _told(analysis))
    evidence = (
        f"implemented by {model_class.__module__}.{model_class.__name__}",
        f"of the modules {', '.join(modules)}",
    )
    return ChecklistItem("Feature implementation", analysis.can_run, evidence, (f"jaxis analyze {model} --tree",))


def _told(analysis: Analysis) -> list[ModuleRow]:
    return [row for row in analysis.modules or () if row.depth and row.is_told]


def _conversion(model: str, analysis: Analysis, conversions: Sequence[RoundTrip]) -> ChecklistItem:
    evidence = []
    if analysis.not_checked:
        evidence.append(f"tensors of the checkpoint itself: {analysis.not_checked}")
    else:  # a model with findings has no report
        evidence.append(f"{analysis.num_tensors} tensors of the checkpoint are the parameters")
    for trip in conversions:
        outcome = "bit for bit the same" if trip.passed else f"{len(trip.different)} differ: {trip.different[0]}"
        evidence.append(
            f"tiny twin to Orbax ({trip.layout}) and back: {trip.num_tensors} tensors in {trip.num_arrays} arrays, "
            f"{outcome}"
        )
    passed = all(trip.passed for trip in conversions)
    commands = (f"jaxis convert {model} ORBAX --to orbax --scanned", "jaxis convert ORBAX BACK --to hf")
    return ChecklistItem("Checkpoint conversion", passed, tuple(evidence), commands)


def _modules(verifications: Sequence[VerifyResult], commands: tuple[str, ...]) -> ChecklistItem:
    evidence, passed = [], True
    for result in verifications:
        layers = result.layers
        if layers is None:
            continue
        worst = max((m for m in layers.modules if m.own_error is not None), key=lambda m: m.own_error or 0.0)
        evidence.append(
            f"{result.dtype}: {layers.num_compared} modules against the reference's, each given its input: largest "
            f"error {worst.own_error:.1e} ({worst.name}), limit {layers.limit:.0e}"
        )
        if layers.divergence is not None:
            evidence.append(f"{result.dtype}: {layers.divergence}")
        passed &= layers.passed
    return ChecklistItem("Unit testing: every module", passed and bool(evidence), tuple(evidence), commands)


def _logits(verifications: Sequence[VerifyResult], commands: tuple[str, ...]) -> ChecklistItem:
    evidence = []
    for result in verifications:
        for check in result.logits:
            figures = check.comparison
            evidence.append(
                f"{result.dtype}, {check.prompt_length} tokens: relative error {figures.relative_error:.1e}, KL mean "
                f"{figures.mean_kl_nats:.1e} max {figures.max_kl_nats:.1e} nats, same best token "
                f"{figures.argmax_agreement:.1%}"
            )
        if (images := result.images) is not None:
            evidence.append(
                f"{result.dtype}, an image: {images.num_embeddings} embeddings, relative error "
                f"{images.embeddings_error:.1e}; logits with it {images.comparison.relative_error:.1e}"
            )
    checks = [check for result in verifications for check in (*result.logits, result.images) if check is not None]
    passed = all(check.passed for check in checks)
    return ChecklistItem("Logit verification", passed, tuple(evidence), commands)


def _decoding(verifications: Sequence[VerifyResult], commands: tuple[str, ...]) -> ChecklistItem:
    evidence = []
    for result in verifications:
        decode = result.decode
        assert decode is not None  # all parts were checked
        if decode.skipped:
            evidence.append(f"{result.dtype}: greedy tokens skipped: {decode.skipped}")
        else:
            tie = "a tie of " if decode.passed else ""
            apart = "" if decode.margin is None else f"; then {tie}{decode.margin:.1e} in logits"
            equal = f"{decode.num_equal} of {decode.num_tokens}"
            evidence.append(f"{result.dtype}: greedy tokens equal the reference's for {equal}{apart}")
        worst = max(path.comparison.max_kl_nats for path in result.paths)
        names = ", ".join(path.path for path in result.paths)
        evidence.append(f"{result.dtype}: {names}: KL to the sequence run at once at most {worst:.1e} nats")
    passed = all({"decode", "paths"}.isdisjoint(result.failing_checks) for result in verifications)
    return ChecklistItem("Decode test, on every path", passed, tuple(evidence), commands)


def _documentation(model: str, analysis: Analysis) -> ChecklistItem:
    model_class = get_model_class(list(analysis.architectures))
    module = inspect.getmodule(model_class)
    about = (inspect.getdoc(module) if module is not None else None) or ""
    first_line = about.partition("\n")[0]
    evidence = (first_line or f"{model_class.__module__} has no docstring that says what the family is",)
    commands = (f"jaxis generate {model} 'Hello'", f"jaxis chat {model}")
    return ChecklistItem("Documentation: what it is, how to run it", bool(first_line), evidence, commands)
