"""Configuration of an inference run, and reading of YAML."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxis.errors import ConfigError
from jaxis.inference.generation_params import GenerationParams
from jaxis.inference.model_params import ModelParams
from jaxis.inference.parameter_group import ParameterGroup


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-5 as a number; in YAML 1.1 it is a string."""


_Loader.yaml_implicit_resolvers = {
    first: [*resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, what: str) -> Any:
    """Parses YAML; raises ConfigError with one line if it is invalid. `what` names the text in the error."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {' '.join(str(error).split())}") from None


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
      remote_params: Not supported: nothing is sent to a remote server.
    """

    model: ModelParams = field(default_factory=ModelParams)
    generation: GenerationParams = field(default_factory=GenerationParams)
    input_path: str | None = None
    output_path: str | None = None
    progress_path: str | None = None
    engine: str | None = None
    remote_params: Any = None

    @classmethod
    def section(cls) -> str:
        return "config"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", ModelParams.of(self.model))
        object.__setattr__(self, "generation", GenerationParams.of(self.generation))
        for name in ("input_path", "output_path", "progress_path"):
            if isinstance(getattr(self, name), Path):
                object.__setattr__(self, name, str(getattr(self, name)))
            self.check(name, str, "the path of a file", optional=True)
        if self.engine is not None and str(self.engine).upper() != "JAX":
            self.refuse("engine", "this is the JAX engine; leave it out, or write JAX")
        if self.remote_params is not None:
            self.refuse("remote_params", "this engine sends nothing anywhere")

    def notes(self) -> list[str]:
        return self.model.notes() + self.generation.notes()

    @classmethod
    def from_yaml(cls, path: str | Path) -> InferenceConfig:
        """Reads a YAML file. Raises ConfigError if it cannot be read, or a field cannot be honoured."""
        return cls.of(read_yaml_mapping(path))


def read_yaml_mapping(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file. Raises ConfigError if it cannot be read, or is not a mapping."""
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no configuration: it needs sections such as `model:`")
    return value
