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
from jaxis.doctor.check import Case, Check, CheckFailed, run_case
from jaxis.doctor.product_cases import product_cases
from jaxis.doctor.speed_case import speed_cases
from jaxis.host.machine import cpu_model
from jaxis.llm import LLM
from jaxis.parallel.mesh import make_mesh
from jaxis.sampling_params import SamplingParams

# Checks of the embedded model: its answers word for word, alone, together, and on several devices.


ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is 7 plus 5?": "7 + 5 = 12.",
    "What sound does a dog make?": "A dog says woof.",
    "What color is the sky?": "The sky is blue.",
    "Who are you?": "I am Tiny, the small demonstration model of jaxis. I know a few tables and nothing else.",
}
"""What the embedded model answers, greedily, in float32 and in bfloat16: each token is far likelier than others."""
_MAX_TOKENS = 32
_MOST_DEVICES = 8  # its attention heads


def model_cases() -> Iterator[Case]:
    """Checks of whole answers on this machine's devices."""
    yield Case("model", "answers of the embedded model, together and alone", functools.partial(_check_answers, 1))
    number = _devices_to_share()
    if number > 1:
        yield Case("model", f"its answers from {number} devices", functools.partial(_check_answers, number))


def _devices_to_share() -> int:
    """The most local devices that the embedded model can be spread over."""
    number = 1
    while 2 * number <= min(len(jax.local_devices()), _MOST_DEVICES):
        number *= 2
    return number


def _check_answers(tensor_parallel_size: int) -> str:
    conversations = [[{"role": "user", "content": question}] for question in ANSWERS]
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
    with LLM(
        tensor_parallel_size=tensor_parallel_size, max_model_len=256, max_num_seqs=len(ANSWERS), show_progress=False
    ) as llm:
        together = [output.outputs[0] for output in llm.chat(conversations, params, use_tqdm=False)]
        alone = [llm.chat(each, params, use_tqdm=False)[0].outputs[0] for each in conversations]
    for question, expected, first, second in zip(ANSWERS, ANSWERS.values(), together, alone, strict=True):
        if first.text != expected:
            raise CheckFailed(f"{question!r} is answered with {first.text!r} instead of {expected!r}")
        if list(first.token_ids) != list(second.token_ids):
            raise CheckFailed(f"{question!r} is answered differently alone, with {second.text!r}")
    return f"{len(ANSWERS)} of {len(ANSWERS)} answers word for word, the same tokens together and alone"


SCHEMA = 1
"""Version of the JSON that `Examination.to_json` writes; incremented when a field changes its meaning or is removed."""


@dataclass(frozen=True)
class Examination:
    """The result of `jaxis doctor`.

    Attributes:
      made_at: UTC, to the second.
      subject: What was checked, in one sentence.
      environment: Versions, devices and the like, as `jaxis env` has them.
      checks: In the order that they ran.
    """

    made_at: str
    subject: str
    environment: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check came out as it should."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> str:
        """The report as one JSON object."""
        found = {"schema": SCHEMA, "passed": self.passed} | dataclasses.asdict(self)
        return json.dumps(found, indent=2)

    def to_markdown(self) -> str:
        """The report for people."""
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
    """The text as a cell of a Markdown table."""
    return text.replace("|", "\\|")


def examine(
    environment: dict[str, Any],
    *,
    on_start: Callable[[Case], object] = lambda _: None,
    on_check: Callable[[Check], object] = lambda _: None,
) -> Examination:
    """Runs every check on this machine's first device, and the model's on several devices too.

    Args:
      environment: What the report says of versions and devices.
      on_start: Called before each check.
      on_check: Called after each check.
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
    """What is checked on this machine, in one sentence."""
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
    """Runs a check of a kernel as the engine runs programs: under a mesh, of the first device."""
    with jax.set_mesh(make_mesh()):
        return case.run()


def _describe_devices() -> str:
    devices = jax.local_devices()
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
