from __future__ import annotations

from pathlib import Path

from jaxis.config import ModelConfig, VllmConfig
from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.lora.merge import MergedAdapter
from jaxis.models.changed_checkpoint import write_changed
from jaxis.models.common.interfaces import has_tied_head
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.tied_tables import tables_of
from jaxis.models.written_template import write_template
from jaxis.tokenizer.template_choice import adapter_template


def write_merged(source: Path, adapter: Path, folder: Path) -> None:
    """Writes a checkpoint in Hugging Face's format, with an adapter merged as `MergedAdapter` does.

    Raises ConfigError or CheckpointError if the checkpoint is a GGUF file or not supported, or the adapter cannot be
    merged.
    """
    if gguf_file(source) is not None:
        raise ConfigError(f"{source} is a GGUF file, into which no adapter is merged: convert it first (--to hf)")
    merged = MergedAdapter(adapter)
    tables = tables_of(read_hf_config(source), source, merged)
    model = construct_abstractly(VllmConfig(ModelConfig(str(source), tables.config)), check_config=False)
    names, is_tied = checkpoint_names_of(model), has_tied_head(model)
    changer = merged.begin(names.name_here, is_tied=is_tied or tables.are_split)
    write_changed(source, folder, changer.changed, names, tables, is_tied=is_tied)
    changer.check_all_used()
    write_template(folder, adapter_template(adapter))
