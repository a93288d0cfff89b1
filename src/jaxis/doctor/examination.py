"""Runs all checks of `jaxis doctor` and writes its report."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.doctor.attention_cases import attention_cases
from jaxis.doctor.check import Case, Check, run_case
from jaxis.doctor.model_cases import model_cases
from jaxis.doctor.product_cases import product_cases
from jaxis.doctor.speed_case import speed_cases
from jaxis.host.json_object import json_object_text
from jaxis.host.machine import cpu_model
from jaxis.parallel.mesh import make_mesh

SCHEMA = 1
"""Version of the JSON that `Examination.to_json` writes; incremented when a field changes its meaning or is removed."""


@dataclass(frozen=True)
class Examination:
    """The result of `jaxis doctor`: time in UTC, the checked devices in one sentence, and the facts of `jaxis env`."""

    made_at: str
    subject: str
    environment: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> str:
        facts = {"schema": SCHEMA, "status": "passed" if self.passed else "failed", "passed": self.passed}
        return json_object_text(facts | dataclasses.asdict(self))

    def to_markdown(self) -> str:
        wrong = sum(not check.passed for check in self.checks)
        verdict = "everything is as it should be" if self.passed else f"{wrong} of {len(self.checks)} checks failed"
        lines = ["# jaxis doctor", "", f"{self.made_at}: {verdict}.", "", f"{self.subject}", ""]
        lines += ["| | check | found | s |", "|---|---|---|---|"]
        for check in self.checks:
            mark, name = "ok" if check.passed else "**FAILED**", f"{check.area}: {check.name}"
            lines.append(f"| {mark} | {_cell(name)} | {_cell(check.detail)} | {check.seconds:.1f} |")
        lines += ["", "## Environment", "", "```json", json.dumps(self.environment, indent=2), "```"]
        return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def examine(
    environment: dict[str, Any],
    *,
    on_start: Callable[[Case], object] = lambda _: None,
    on_check: Callable[[Check], object] = lambda _: None,
) -> Examination:
    """Runs every check on this machine's first device, and the model's on several devices too.

    `environment` is for the report; `on_start` and `on_check` are called before and after each check.
    """
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    checks = [run_case(Case("devices", "JAX starts", _describe_devices))]
    on_check(checks[0])
    if not checks[0].passed:
        return Examination(made_at, "JAX found no device: nothing else was checked.", environment, tuple(checks))
    for case in _cases():
        on_start(case)
        checks.append(run_case(case))
        on_check(checks[-1])
    return Examination(made_at, subject(), environment, tuple(checks))


def subject() -> str:
    """Describes the devices that are checked on this machine, in one sentence."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return (
            f"This machine has no accelerator that JAX sees, only a CPU ({cpu_model()}): the kernels for CPU were "
            "checked. Those for TPU and GPU were not."
        )
    return f"The kernels for {device.platform.upper()} were checked on {device.device_kind}."


def _cases() -> Iterator[Case]:
    is_cpu = jax.local_devices()[0].platform == "cpu"
    dtype, tolerance = (jnp.float32, 1e-4) if is_cpu else (jnp.bfloat16, 2e-2)
    for cases in (attention_cases, product_cases):
        for case in cases(dtype, tolerance):
            yield dataclasses.replace(case, run=functools.partial(_run_on_one_device, case))
    yield from model_cases()
    yield from speed_cases()


def _run_on_one_device(case: Case) -> str:
    """Runs a kernel's check as the engine runs programs: under a mesh, here of the first device."""
    with jax.set_mesh(make_mesh()):
        return case.run()


def _describe_devices() -> str:
    devices = jax.local_devices()
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
