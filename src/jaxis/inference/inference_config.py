"""Configuration of an inference run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, refused
from jaxis.config.yaml_file import read_yaml_mapping
from jaxis.engine.model_params import ModelParams
from jaxis.inference.generation_params import GenerationParams, GuidedDecodingParams


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(ParameterGroup):
    """Configuration of a run: model, parameters and files.

    Attributes:
      model: Model, and how it is loaded.
      generation: Sampling of answers.
      input_path: JSONL file of conversations.
      output_path: JSONL file to write.
      progress_path: JSON file {total, completed, failed, updated_at}, kept up to date during the run.
      engine: None or "JAX".
    """

    model: ModelParams = field(default_factory=ModelParams)
    generation: GenerationParams = field(default_factory=GenerationParams)
    input_path: str | None = None
    output_path: str | None = None
    progress_path: str | None = None
    engine: str | None = None

    UNUSED: ClassVar[Mapping[str, Unused]] = {"remote_params": refused("this engine sends nothing anywhere")}

    @classmethod
    def section(cls) -> str:
        return "config"

    @classmethod
    def groups(cls) -> tuple[type[ParameterGroup], ...]:
        return (cls, ModelParams, GenerationParams, GuidedDecodingParams)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "model", ModelParams.of(self.model))
        object.__setattr__(self, "generation", GenerationParams.of(self.generation))
        for name in ("input_path", "output_path", "progress_path"):
            if isinstance(getattr(self, name), Path):
                object.__setattr__(self, name, str(getattr(self, name)))
            self.check(name, str, "the path of a file", optional=True)
        if self.engine is not None and str(self.engine).upper() != "JAX":
            self.refuse("engine", "this is the JAX engine; leave it out, or write JAX")

    def notes(self) -> list[str]:
        return self.model.notes() + self.generation.notes()

    @classmethod
    def from_yaml(cls, path: str | Path) -> InferenceConfig:
        """Reads a YAML file. Raises ConfigError if it cannot be read, or a field cannot be honoured."""
        return cls.of(read_yaml_mapping(path))
