"""The YAML file of a training run: `TrainConfig`, a file for each of its sections."""

from jaxis.training.config.data import FINAL_TURN, FIRST_EXHAUSTED, DatasetParams, SplitParams
from jaxis.training.config.distillation import TEACHER_PROMPT, DistillationParams
from jaxis.training.config.grpo import CORRECT, ERROR, GrpoParams
from jaxis.training.config.peft import PeftParams
from jaxis.training.config.run import ROUTER_KEYS, TrainConfig
from jaxis.training.config.training import DISTILLATION, DPO, ENGINE, GRPO, OPTIMIZERS, PLAIN, SFT, TrainingParams

__all__ = [
    "CORRECT",
    "DISTILLATION",
    "DPO",
    "ENGINE",
    "ERROR",
    "FINAL_TURN",
    "FIRST_EXHAUSTED",
    "GRPO",
    "OPTIMIZERS",
    "PLAIN",
    "ROUTER_KEYS",
    "SFT",
    "TEACHER_PROMPT",
    "DatasetParams",
    "DistillationParams",
    "GrpoParams",
    "PeftParams",
    "SplitParams",
    "TrainConfig",
    "TrainingParams",
]
