"""The workflows of .github run what the repository has, and nothing that changes under them."""

import re
import shlex
import tomllib

import pytest
import yaml

from tests.support.places import REPOSITORY

GITHUB = REPOSITORY / ".github"
FILES = sorted([*GITHUB.glob("workflows/*.yml"), *GITHUB.glob("actions/*/action.yml")])
MAKEFILE = (REPOSITORY / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))


def steps(path):
    """(matrix of the job, step) of every step of a workflow or an action."""
    document = yaml.safe_load(path.read_text("utf-8"))
    for job in document.get("jobs", {"action": document.get("runs")}).values():
        for step in job["steps"]:
            yield job.get("strategy", {}).get("matrix", {}), step


def commands():
    """Every command line, with each of the targets that a matrix puts into it."""
    for path in FILES:
        for matrix, step in steps(path):
            for target in matrix.get("target", [""]):
                yield step.get("run", "").replace("${{ matrix.target }}", target)


def test_make_is_asked_for_targets_that_it_has():
    asked = {shlex.split(command)[1] for command in commands() if command.startswith("make ")}
    assert {"lint", "test-python", "test-slow", "test-vllm", "docs", "wheels"} <= asked
    assert asked <= TARGETS


def test_files_that_commands_name_are_there():
    named = {name for command in commands() for name in re.findall(r"(?:tools|tests|examples)/[\w./-]*\w", command)}
    assert "tools/release_notes.py" in named
    assert not [name for name in named if not (REPOSITORY / name).exists()]


def test_an_action_has_one_version_by_its_commit():
    used = [step["uses"] for path in FILES for _, step in steps(path) if "uses" in step]
    own = {name for name in used if name.startswith("./")}
    assert all((REPOSITORY / name / "action.yml").is_file() for name in own)
    pins = dict(name.split("@") for name in used if name not in own)
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in pins.values())
    assert {f"{name}@{commit}" for name, commit in pins.items()} == set(used) - own


def test_images_have_extras_that_there_are():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    jobs = yaml.safe_load((GITHUB / "workflows/release.yml").read_text("utf-8"))["jobs"]
    images = jobs["image"]["strategy"]["matrix"]["include"]
    assert {extra for image in images for extra in image["extras"].split(",")} <= set(extras)


def test_a_commit_is_checked_by_the_tools_of_make_lint():
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = {hook["entry"].replace(" --force-exclude", "") for hook in config["repos"][0]["hooks"]}
    [rule] = re.findall(r"^lint: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    lines = [line.replace("$(VENV)", ".venv").replace("$(NATIVE_SOURCES)", "") for line in rule.splitlines()]
    assert hooks == {re.sub(r" \.$", "", line.strip()) for line in lines}


@pytest.mark.parametrize(("tag", "said"), [("v0.0.0", "tag v"), ("main", "tag v")])
def test_a_release_is_of_the_version(tag, said):
    from tools.release_notes import notes

    with pytest.raises(SystemExit, match=said):
        notes(tag)
