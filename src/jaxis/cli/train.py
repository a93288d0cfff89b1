"""`jaxis train`: fine-tunes a model."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from jaxis.cli.command import FIELDS, Command, apply_overrides
from jaxis.cli.console import EXIT_INTERRUPTED, note, print_json, report_errors
from jaxis.cli.host_options import TrainHostOptions
from jaxis.cli.options import Debug, JsonAnswer, expand_options
from jaxis.host.extras import check_extra

if TYPE_CHECKING:
    from jaxis.training.config import TrainConfig
    from jaxis.training.trainer import Trainer, TrainingResult

_RESUME = "--training.try_resume_from_last_checkpoint"


class _Trained(NamedTuple):
    """Result of a run, its configuration, and the model that it began with."""

    result: TrainingResult
    config: TrainConfig
    base: Path


@expand_options
def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="YAML file with model, data and training.", show_default=False
        ),
    ] = None,
    show_examples: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Print the first N examples, what is learned in «», and train nothing."),
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Check configuration, model and data rows, and train nothing.")
    ] = False,
    as_json: JsonAnswer = False,
    hosts: TrainHostOptions = TrainHostOptions(),  # noqa: B008 (frozen; only its type is used)
    debug: Debug = False,
) -> None:
    """Fine-tune a model: all weights, or adapters; on conversations, texts or preferences.

    Every field of the file can be given on the command line, by its dotted name.
    The finished model goes to training.output_dir, as do checkpoints and metrics.jsonl.
    A run that is stopped by Ctrl-C or SIGTERM saves a checkpoint first, and prints the command that goes on.
    With --nnodes or --cluster, several hosts share a training; each runs the same command.
    With --check, exits with 3 if the run cannot begin; --json goes with it.

    \b
    [bold]Examples[/bold]
      jaxis train -c config.yaml
      jaxis train -c config.yaml --training.learning_rate 1e-4 --training.max_steps 100
      jaxis train -c config.yaml --show-examples 3
      jaxis train -c config.yaml --check --json
    """
    if as_json and not check:
        raise typer.BadParameter("is for --check", param_hint="--json")
    with report_errors(debug=debug, command="train" if check else "", as_json=as_json):
        hosts.check()
        if check:
            _check(config, context.args, as_json=as_json)
            return
        if hosts.are_several and not show_examples:
            result = _train_with_others(hosts, config, context.args)
        else:
            result = _train(config, context.args, show_examples)
        if result is not None:
            _report(result, config, context.args)


def _read(config: Path | None, arguments: list[str]) -> TrainConfig:
    from jaxis.config.yaml_file import read_yaml_mapping
    from jaxis.training.config import TrainConfig

    values = {} if config is None else read_yaml_mapping(config)
    apply_overrides(values, arguments)
    return TrainConfig.of(values)


def _check(config: Path | None, arguments: list[str], *, as_json: bool) -> None:
    train_config = _read(config, arguments)
    from jaxis.training.trainer import Trainer

    found = Trainer(train_config, note).checked()
    if as_json:
        print_json("train", "ready", dataclasses.asdict(found))
        return
    rows = f"{found.num_rows} rows, {found.num_validation_rows} held out"
    tokens = f"{found.num_examples} examples of {found.num_tokens} tokens, {found.num_learned} of them learned"
    print(f"ready: {found.num_steps} steps, {rows}; {tokens}")


def _train(config: Path | None, arguments: list[str], show_examples: int) -> _Trained | None:
    train_config = _read(config, arguments)
    from jaxis.training.trainer import Trainer

    trainer = Trainer(train_config, note)
    if show_examples:
        _show(trainer, show_examples)
        return None
    return _run(trainer, train_config)


def _train_with_others(options: TrainHostOptions, config: Path | None, arguments: list[str]) -> _Trained | None:
    """Trains together with other hosts. Only host 0 prints and writes what a single one does."""
    check_extra("server", "--cluster" if options.cluster else "--nnodes")
    from jaxis.training.hosts import joined, place_by_cluster

    place = place_by_cluster(options.distributed_timeout_seconds) if options.cluster else options.place()
    if place.rank == 0:
        note(f"waiting for {place.num_hosts - 1} more hosts at {place.address}:{place.port}")
    with joined(place) as hosts:
        train_config = _read(config, arguments)
        from jaxis.host.progress import ProgressDisplay
        from jaxis.training.trainer import Trainer

        trainer = Trainer(train_config, note if hosts.is_first else lambda _: None)
        hosts.agree(trainer.facts())
        if hosts.is_first:
            return _run(trainer, train_config)
        trainer.run(ProgressDisplay(enabled=False))
    return None


def _run(trainer: Trainer, config: TrainConfig) -> _Trained:
    from jaxis.host.progress import ProgressDisplay

    return _Trained(trainer.run(ProgressDisplay()), config, trainer.base.path)


def _show(trainer: Trainer, count: int) -> None:
    from jaxis.training.examples import shown

    for example in trainer.data.examples[:count]:
        print(f"--- {example.where}: {len(example.ids)} tokens, {example.num_learned} learned")
        print(shown(example, trainer.base.tokenizer))


def _report(trained: _Trained, config: Path | None, arguments: list[str]) -> None:
    import signal

    result = trained.result
    if result.stopped_by is None:
        for line in _finished(*trained):
            note(line)
        return
    command = ["jaxis", "train", *(() if config is None else ("-c", str(config))), *_without_resume(arguments)]
    note(f"stopped after step {result.step} of {result.num_steps}, saved in {result.checkpoint}; this goes on:")
    note(f"  {shlex.join([*command, _RESUME, 'true'])}")
    if result.stopped_by == signal.SIGINT:
        sys.exit(EXIT_INTERRUPTED)


def _finished(result: TrainingResult, config: TrainConfig, base: Path) -> list[str]:
    """Describes the results of a run, and their uses."""
    done, output = f"{result.num_steps} steps done", str(result.output)
    if not config.training.save_final_model:
        return [f"{done}; the model was not saved (training.save_final_model)"]
    if not config.training.use_peft or config.peft.peft_save_mode == "merged":
        return [f"{done}; the model is in {output}. Try: jaxis generate {shlex.join([output, 'Hello'])}"]
    name = config.model.model_name or str(base)
    return [
        f"{done}; the adapter is in {output}. Try: jaxis generate {shlex.join([name, 'Hello', '--adapter', output])}",
        f"a model of it: jaxis convert {shlex.join([name, f'{output}-merged', '--adapter', output])}; "
        f"for llama.cpp, to {shlex.quote(f'{output}.gguf')}",
    ]


def _without_resume(arguments: list[str]) -> list[str]:
    """Removes the arguments that say where a run continues."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.startswith((_RESUME, "--training.resume_from_checkpoint")):
            if "=" not in word:
                next(words, None)
            continue
        kept.append(word)
    return kept


COMMANDS = (Command("train", train, "training", FIELDS),)
