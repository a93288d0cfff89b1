"""Distillation's losses, gradients and steps are TRL's, and equal models have none."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.training.data import StepContext
from jaxis.training.divergence import divergence
from jaxis.training.scores import in_chunks
from jaxis.training.trainable import make_trainable
from jaxis.training.trainer import Trainer
from tests.support import training
from tests.support.adapters import base_model
from tests.support.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.training.gradients import largest_error

needs_kernels = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def torch_divergence(student, teacher, beta):
    """TRL's definition, from logits [..., V]."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)

    def divergences(target, given):
        return F.kl_div(given, target, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return divergences(ours, theirs) if beta else divergences(theirs, ours)
    mixture = torch.logsumexp(torch.stack([ours + np.log1p(-beta), theirs + np.log(beta)]), dim=0)
    return beta * divergences(theirs, mixture) + (1 - beta) * divergences(ours, mixture)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("spread", [0.1, 2.0, 10.0])
def test_values_and_slopes_are_those_of_torch(beta, spread):
    student, teacher = np.random.default_rng(0).normal(0, spread, (2, 6, 4396)).astype(np.float32)

    def torchs(dtype):
        theirs = torch.tensor(student, dtype=dtype, requires_grad=True)
        values = torch_divergence(theirs, torch.tensor(teacher, dtype=dtype), beta)
        values.sum().backward()
        return values.detach().numpy(), theirs.grad.numpy()

    found = jax.jit(divergence, static_argnums=2)(student, teacher, beta)
    for mine, exact, rounded in zip(found, torchs(torch.float64), torchs(torch.float32), strict=True):
        assert largest_error(np.asarray(mine), exact) < max(1e-5, 2 * largest_error(rounded, exact))


@pytest.mark.parametrize("beta", BETAS)
def test_equal_logits_have_no_divergence_and_tokens_that_neither_has_no_nan(beta):
    logits = np.random.default_rng(0).normal(0, 5, (4, 300)).astype(np.float32)
    logits[:, 7] = -np.inf
    values, slopes = divergence(logits, logits, beta)
    assert not np.any(values)
    assert not np.any(slopes)
    other = np.roll(logits, 1, axis=0)
    assert np.all(np.isfinite(divergence(logits, other, beta)[0]))


@pytest.mark.parametrize("head_is_frozen", [True, False])
def test_in_chunks_only_learned_tokens_count(head_is_frozen):
    rng = np.random.default_rng(0)
    hidden, theirs = rng.normal(size=(2, 150, 8)).astype(np.float32)
    head, other_head = rng.normal(size=(2, 8, 40)).astype(np.float32)
    learned = rng.random(150) < 0.4

    def loss(hidden, head):
        def of_chunk(logits, rows):
            return divergence(logits, rows @ other_head, 0.5)

        others = {"head_is_frozen": head_is_frozen, "chunk_tokens": 64}
        [values] = in_chunks(of_chunk, lambda rows: rows @ head, hidden, learned, jnp.asarray(theirs), **others)
        return values.sum()

    total, found = jax.value_and_grad(loss, argnums=(0,) if head_is_frozen else (0, 1))(hidden, head)
    torch_hidden, torch_head = (torch.tensor(each, requires_grad=True) for each in (hidden, head))
    expected = torch_divergence(torch_hidden @ torch_head, torch.tensor(theirs @ other_head), 0.5)[learned].sum()
    expected.backward()
    np.testing.assert_allclose(total, expected.item(), rtol=1e-5)
    for mine, wanted in zip(found, (torch_hidden.grad.numpy(), torch_head.grad.numpy()), strict=False):
        np.testing.assert_allclose(mine, wanted, atol=1e-5 * np.abs(wanted).max())


ROWS = [
    training.dialogue("Where is the cat?", "On the mat.", "And now?", "Under it, I think."),
    training.dialogue("Count.", "One, two, three."),
    training.dialogue("Say hello.", "Hello!"),
]


def config_of(model, rows, output, *, peft=None, distillation=None, **settings):
    given = {"lmbda": 0, **(distillation or {})}
    return training.train_config(
        model, rows, output, peft=peft, trainer_type="TRL_DISTILLATION", distillation=given, **settings
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return training.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A larger model of another family, with more logits than tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    return write_checkpoint(folder, "llama", hidden_size=96, num_hidden_layers=3, vocab_size=VOCAB_SIZE + 8)


@needs_kernels
@pytest.mark.production_xla
@pytest.mark.sampled(8)
@pytest.mark.parametrize("beta", [0.5, 0.0, 1.0])
@pytest.mark.parametrize("peft", [{"lora_r": 4, "lora_dropout": 0.0}, None], ids=["adapters", "all weights"])
@pytest.mark.parametrize("forward_pass", ["plain", "engine"])
def test_a_model_that_is_its_own_teacher_has_no_loss_and_no_gradient(forward_pass, peft, beta, rows, tmp_path):
    settings = {"distillation": {"beta": beta}, "forward_pass": forward_pass, "weight_decay": 0.0}
    training.run(config_of(None, rows, tmp_path / "out", peft=peft, **settings))
    assert [(line["loss"], line["grad_norm"]) for line in training.metrics(tmp_path / "out")] == [(0.0, 0.0)] * 3


def steps_of_torch(student, teacher, examples, beta, temperature):
    """Three steps of SGD by torch: the losses, and the student."""
    optimizer, losses = torch.optim.SGD(student.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for example in examples:
            ids = torch.tensor(example.ids[None]).long()
            with torch.no_grad():
                theirs = teacher(ids, use_cache=False).logits[0, :-1, :VOCAB_SIZE]
            ours = student(ids, use_cache=False).logits[0, :-1]
            learned = torch.tensor(example.learned[1:])
            total = total + torch_divergence(ours / temperature, theirs / temperature, beta)[learned].sum()
            count += int(learned.sum())
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses, student


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("beta", "temperature"), [(0.1, 0.7), (0.0, 1.0), (0.5, 2.0), (1.0, 1.3)])
def test_steps_are_those_of_a_loop_of_torch(beta, temperature, checkpoint, teacher, rows, tmp_path):
    given = {"teacher_model_name_or_path": str(teacher), "beta": beta, "temperature": temperature}
    sgd = {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "per_device_train_batch_size": 3}
    config = config_of(checkpoint("qwen3"), rows, tmp_path / "out", distillation=given, **sgd)
    examples = Trainer(config, lambda _: None).data.examples
    training.run(config)
    losses, student = steps_of_torch(base_model(checkpoint("qwen3")), base_model(teacher), examples, beta, temperature)
    np.testing.assert_allclose([line["loss"] for line in training.metrics(tmp_path / "out")], losses, rtol=1e-5)
    found = base_model(tmp_path / "out").state_dict()
    for name, expected in student.state_dict().items():
        assert largest_error(found[name].numpy(), expected.numpy()) < 1e-5, name


def test_a_packed_batch_has_the_loss_of_its_rows(checkpoint, teacher, rows, tmp_path):
    given, lines = {"distillation": {"teacher_model_name_or_path": str(teacher)}, "max_steps": 1}, []
    for name, packs in (("rows", False), ("packed", True)):
        size = {"per_device_train_batch_size": 2 if packs else 3}
        training.run(config_of(checkpoint("qwen3"), rows, tmp_path / name, data={"pack": packs}, **given, **size))
        lines += training.metrics(tmp_path / name)
    assert lines[0] == pytest.approx(lines[1], rel=1e-5)


def another_vocabulary(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def few_logits(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_vocabulary, r"another vocabulary than .*qwen3: the id of token 'a' is \d+ for the teacher"),
        (few_logits, r"has 300 logits, and .*qwen3 512, of a tokenizer with ids up to \d+"),
        (lambda folder: (folder / "config.json").unlink(), r"teacher_model_name_or_path=.*config\.json"),
        (shutil.rmtree, r"training\.distillation\.teacher_model_name_or_path=.*teacher"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(change, message, checkpoint, teacher, rows, tmp_path):
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    change(folder)
    given = {"teacher_model_name_or_path": str(folder)}
    with pytest.raises(ConfigError, match=message):
        Trainer(config_of(checkpoint("qwen3"), rows, tmp_path / "out", distillation=given), lambda _: None)


def test_a_teacher_larger_than_memory_is_refused(checkpoint, teacher, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxis.training.teacher.free_host_bytes", lambda: 2**18)
    given = {"teacher_model_name_or_path": str(teacher)}
    with pytest.raises(ConfigError, match=r"needs .*iB for its weights, and 256.0 KiB are free: give a smaller"):
        Trainer(config_of(checkpoint("qwen3"), rows, tmp_path / "out", distillation=given), lambda _: None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta": 1.5}, r"training\.distillation\.beta=1\.5 must be a number from 0 to 1"),
        ({"lmbda": -0.1}, r"training\.distillation\.lmbda=-0\.1 must be a number from 0 to 1"),
        ({"temperature": 0}, r"training\.distillation\.temperature=0 must be a number from 0\.001"),
        ({"max_completion_length": 0}, r"max_completion_length=0 must be an integer from 1"),
        ({"lambda": 0}, r"training\.distillation\.lambda is not a known field: did you mean"),
    ],
)
def test_values_out_of_range_are_refused(given, message, rows, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config_of(None, rows, tmp_path / "out", distillation=given)


def sampling_config(model, teacher, rows, output, lmbda=0.5, **settings):
    given = {"teacher_model_name_or_path": str(teacher), "lmbda": lmbda, "max_completion_length": 8}
    given |= settings.pop("distillation", {})
    size = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    return config_of(model, rows, output, distillation=given, **{**size, **settings})


def test_a_share_of_the_rows_has_answers_of_the_student(checkpoint, teacher, tmp_path):
    rows = training.write_rows(tmp_path / "rows.jsonl", ROWS * 4)
    config = sampling_config(checkpoint("qwen3"), teacher, rows, tmp_path / "out", gradient_accumulation_steps=6)
    trainer = Trainer(config, lambda _: None)
    model = make_trainable(config, trainer.base, ProgressDisplay(enabled=False))
    source, given = trainer.data, {example.ids.tobytes() for example in trainer.data.examples}
    context = StepContext(0, lambda: model.bind(model.initial), lambda _: None, ProgressDisplay(enabled=False))
    batch, drawn = source.draw(context)
    again, _ = source.draw(context)
    source.close()
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    sampled = []
    for ids, learned, length in zip(
        *(each.reshape(12, -1) for each in (batch.ids, batch.learned, batch.seq_lens)), strict=True
    ):
        row = ids[: length[0]]
        if row.tobytes() in given:
            continue
        [start, end] = np.flatnonzero(learned)[[0, -1]] + 1
        assert learned[start - 1 : end].all()
        assert end == length[0] - 1
        assert trainer.base.tokenizer.decode(row[:start].tolist()).endswith("assistant\n")
        sampled.append(length[0] - start)
    assert len(sampled) == drawn["sampled"] * 12
    assert 3 <= len(sampled) <= 9
    assert np.mean(sampled) == drawn["completion_length"] <= 8


@pytest.mark.parametrize("lmbda", [0.5, 1])
def test_a_run_that_goes_on_ends_as_one_that_never_stopped(lmbda, checkpoint, teacher, rows, tmp_path):
    if lmbda == 1:
        asked = [{"prompt": [row["messages"][0]]} for row in ROWS]
        rows = training.write_rows(tmp_path / "prompts.jsonl", asked)
    given = {"lmbda": lmbda, "save_steps": 2, "peft": {"lora_r": 2, "lora_dropout": 0.0}}
    arguments = checkpoint("qwen3"), teacher, rows
    training.run(sampling_config(*arguments, tmp_path / "whole", **given, distillation={"log_completions": True}))
    resumed = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-2")}
    training.run(sampling_config(*arguments, tmp_path / "rest", **given, **resumed))
    whole, rest = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert whole == rest
    lines = training.metrics(tmp_path / "whole")
    assert lines[2:] == training.metrics(tmp_path / "rest")
    assert all(line["loss"] > 0 for line in lines)
    answers = (tmp_path / "whole" / "answers.jsonl").read_text().splitlines()
    assert len(answers) == pytest.approx(len(ROWS) * sum(line["sampled"] for line in lines))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lmbda": 0.5}, r"prompts\.jsonl, line 1: has a prompt alone: set training\.distillation\.lmbda to 1"),
        ({"lmbda": 0}, r"prompts\.jsonl, line 1: has a prompt alone"),
        ({"data": {"pack": True}, "lmbda": 1}, r"data\.train\.pack cannot be honoured where answers are sampled"),
        ({"distillation": {"max_completion_length": 1020}, "lmbda": 1}, r"line 1: its prompt of \d+ tokens leaves no"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(settings, message, checkpoint, teacher, tmp_path):
    rows = training.write_rows(tmp_path / "prompts.jsonl", [{"prompt": [{"role": "user", "content": "Count."}]}])
    with pytest.raises(ConfigError, match=message):
        Trainer(sampling_config(checkpoint("qwen3"), teacher, rows, tmp_path / "out", **settings), lambda _: None)


HINTED = [
    {"messages": row["messages"][-2:], "privileged_context": f"The answer is {row['messages'][-1]['content']}"}
    for row in ROWS
]


@pytest.mark.parametrize("template", [None, "Be brief. {prompt}"], ids=["a hint", "a template"])
def test_a_model_teaches_itself_by_a_better_prompt(template, checkpoint, tmp_path):
    """A step of SGD by torch, in which the teacher is the model before training, and reads the hints."""
    rows = training.write_rows(tmp_path / "rows.jsonl", HINTED)
    given = {"beta": 0.5, **({} if template is None else {"teacher_prompt_template": template})}
    sgd = {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0, "max_steps": 2}
    size = {"per_device_train_batch_size": 3, "eval_strategy": "steps", "eval_steps": 2}
    config = config_of(checkpoint("qwen3"), rows, tmp_path / "out", distillation=given, validation=rows, **sgd, **size)
    trainer = Trainer(config, lambda _: None)
    training.run(config)
    student, teacher = (base_model(checkpoint("qwen3")) for _ in range(2))
    optimizer, losses, tokenizer = torch.optim.SGD(student.parameters(), lr=0.1), [], trainer.base.tokenizer
    for _ in range(3):
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for row in HINTED:
            [asked, answer], hint = row["messages"], row["privileged_context"]
            told = f"{asked['content']}\n\n{hint}" if template is None else f"Be brief. {asked['content']}"
            ids = [tokenizer.encode_chat([asked, answer], add_generation_prompt=False)]
            ids.append(tokenizer.encode_chat([{**asked, "content": told}, answer], add_generation_prompt=False))
            start = len(tokenizer.encode_chat([asked], add_generation_prompt=True))
            num_learned = len(ids[0]) - start - 1  # the template ends with a line break, which is not learned
            ours, theirs = (
                model(torch.tensor([each]), use_cache=False).logits[0][-num_learned - 2 : -2]
                for model, each in zip((student, teacher), ids, strict=True)
            )
            total = total + torch_divergence(ours, theirs.detach(), 0.5).sum()
            count += num_learned
        losses.append((total / count).item())
        (total / count).backward()
        optimizer.step()
    lines = training.metrics(tmp_path / "out")
    found = [*(line["loss"] for line in lines if "loss" in line), lines[-1]["eval_loss"]]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_the_student_answers_and_the_teacher_reads_more(checkpoint, tmp_path):
    rows = training.write_rows(tmp_path / "rows.jsonl", HINTED * 2)
    given = {"lmbda": 0.5, "max_completion_length": 8, "log_completions": True}
    settings = {"gradient_accumulation_steps": 3, "peft": {"lora_r": 2, "lora_dropout": 0.0}}
    training.run(config_of(checkpoint("qwen3"), rows, tmp_path / "out", distillation=given, **settings))
    lines = training.metrics(tmp_path / "out")
    assert all(0 < line["sampled"] < 1 and line["loss"] > 0 and line["grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": HINTED[0]["messages"]}, None, r"line 4: has no string privileged_context"),
        ({"text": "All of it.", "privileged_context": "b"}, None, r"line 4: has a prompt that is no string"),
        (HINTED[0], "{privileged_context}", r"teacher_prompt_template=.* must have {prompt}"),
    ],
)
def test_prompts_that_the_teacher_cannot_have_are_refused(row, template, message, checkpoint, tmp_path):
    rows = training.write_rows(tmp_path / "rows.jsonl", [*HINTED, row])
    with pytest.raises(ConfigError, match=message):
        Trainer(
            config_of(checkpoint("qwen3"), rows, tmp_path, distillation={"teacher_prompt_template": template}),
            lambda _: None,
        )
