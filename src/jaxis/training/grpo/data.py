"""The data rows of a GRPO run: prompts, optionally with answers, which reward functions receive as `reference`."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.training.base_model import BaseModel
from jaxis.training.config import ENGINE, TrainConfig
from jaxis.training.grpo.rollouts import Rollouts
from jaxis.training.rows import DataRow, read_rows, with_answer


def load_rollouts(config: TrainConfig, base: BaseModel) -> tuple[Rollouts, dict[str, str]]:
    """Returns the batch source of a run and the digest of each file.

    Raises ConfigError if a file cannot be read, a data row has no prompt, or the configuration is not supported.
    """
    if config.fsdp.enable_fsdp:
        raise ConfigError("fsdp.enable_fsdp cannot be honoured with TRL_GRPO: leave it out")
    grpo = config.training.grpo
    if config.training.forward_pass != ENGINE and (grpo.has_filters or grpo.num_iterations > 1):
        needing = "top_p, top_k and min_p need" if grpo.has_filters else "num_iterations above 1 needs"
        raise ConfigError(
            f"training.grpo.{needing} training.forward_pass=engine, whose log-probabilities are those of sampling"
        )
    split = config.data.train
    rows: list[DataRow] = []
    digests: dict[str, str] = {}
    for dataset in split.datasets:
        seed = next(s for s in (dataset.seed, split.seed, config.training.data_seed) if s is not None)
        found, of_files = read_rows(dataset, seed, with_answer)
        rows += found
        digests |= of_files
    return Rollouts(config, base, rows), digests
