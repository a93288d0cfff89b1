"""The section `training.distillation`: teacher, student's answers and their divergence, under TRL's names."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.config.parameter_group import ParameterGroup, number, text, whole

TEACHER_PROMPT = "{prompt}\n\n{privileged_context}"


@dataclass(frozen=True, kw_only=True)
class DistillationParams(ParameterGroup):
    """Settings of distillation.

    Attributes:
      teacher_model_name_or_path: Folder or Hub id of the teacher; None: the model itself, as it was before training.
      teacher_model_revision: Branch, tag or commit of a Hub id.
      lmbda: Share of rows whose answers the student samples; the others are learned as they are given.
      beta: Divergence of the student from the teacher: 0 for the forward Kullback-Leibler divergence, 1 for the reverse
        one, and between them the generalized Jensen-Shannon divergence.
      temperature: Temperature of sampling, and of both distributions that are compared.
      max_completion_length: Limit of a sampled answer's tokens.
      teacher_prompt_template: The teacher's last message of the user, with {prompt} for the student's and
        {privileged_context} for the column of that name, which the student does not read. None:
        "{prompt}\n\n{privileged_context}" if rows have that column, else the student's prompt.
      log_completions: True to write every sampled answer to answers.jsonl.
    """

    teacher_model_name_or_path: str | None = text(None, "a folder or a Hub id")
    teacher_model_revision: str | None = text(None, "a branch, tag or commit")
    lmbda: float = number(1.0, 0, 1)
    beta: float = number(1.0, 0, 1)
    temperature: float = number(1.0, 1e-3)
    max_completion_length: int = whole(512, 1)
    teacher_prompt_template: str | None = text(None, "a string")
    log_completions: bool = False

    @classmethod
    def section(cls) -> str:
        return "training.distillation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{prompt}" not in (self.teacher_prompt_template or TEACHER_PROMPT):
            self.refuse("teacher_prompt_template", "it must have {prompt}, where the student's prompt stands")
        self.check("log_completions", bool, "true or false")
