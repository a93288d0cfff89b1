"""The YAML file of a training run: `TrainConfig`, a file for each of its sections."""

from jaxis.training.config.data import FINAL_TURN, FIRST_EXHAUSTED, DatasetParams, SplitParams
from jaxis.training.config.peft import PeftParams
from jaxis.training.config.run import ROUTER_KEYS, TrainConfig
from jaxis.training.config.training import DPO, ENGINE, OPTIMIZERS, PLAIN, TrainingParams

__all__ = [
    "DPO",
    "ENGINE",
    "FINAL_TURN",
    "FIRST_EXHAUSTED",
    "OPTIMIZERS",
    "PLAIN",
    "ROUTER_KEYS",
    "DatasetParams",
    "PeftParams",
    "SplitParams",
    "TrainConfig",
    "TrainingParams",
]
