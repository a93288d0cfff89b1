"""The documentation is true: its Python runs, its links lead somewhere, its lists of names are complete."""

import ast
import dataclasses
import importlib.util
import inspect
import re

import pytest
from packaging.version import Version

from jaxis import LLM, SamplingParams
from jaxis.config.rope_config import ROPE_TYPES
from jaxis.loading.gguf.families import READ
from jaxis.models.registry import built_in_families, built_in_models
from jaxis.version import __version__
from tests.support.places import REPOSITORY
from tools.docs_site import put_together
from tools.supported_models.page import page as models_page

ENCODERS = {name for name, declared in READ.items() if not declared[0].is_causal}
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "src/jaxis/assets/**/*.md")
    for path in REPOSITORY.glob(pattern)
    if not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts)
)
# A Python block runs, unless one of these comments stands on the line before it. In an excerpt, `...` stands for lines.
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
EXCERPT = re.compile(r"<!-- from (\S+) -->")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
PACKAGE = REPOSITORY / "src" / "jaxis"
FOLDERS = {path.name for folder in (REPOSITORY, PACKAGE) for path in folder.iterdir() if path.is_dir()} - {"build"}


def page_id(path):
    return path.relative_to(REPOSITORY).as_posix()


def python_blocks(path):
    """(line number, source, the line before it) of each Python block of a page."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match[2] == "python":
            before = text[: match.start()].rstrip().rpartition("\n")[2].strip()
            source = inspect.cleandoc("\n" + match[3]) if match[1] else match[3]
            yield text.count("\n", 0, match.start()) + 2, source, before


def runs(before):
    return not NOT_RUN.fullmatch(before) and not EXCERPT.fullmatch(before)


def anchors(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names_in_code(path):
    """Every word that the page sets in `code`."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text(encoding="utf-8")))
    return {word for span in spans for word in re.findall(r"[\w-]+", span)}


def test_there_are_pages():
    names = {page_id(path) for path in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/sampling.md"} <= names


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_python_blocks_are_valid_python_or_excerpts(path):
    for line, source, before in python_blocks(path):
        if excerpt := EXCERPT.fullmatch(before):
            file = (REPOSITORY / excerpt[1]).read_text(encoding="utf-8")
            for part in re.split(r"^ *\.\.\.\n", source, flags=re.MULTILINE):
                assert part in file, f"{page_id(path)}:{line}: not an excerpt of {excerpt[1]}"
            continue
        try:
            ast.parse(source)
        except SyntaxError as error:
            pytest.fail(f"{page_id(path)}:{line + (error.lineno or 1) - 1}: {error.msg}")


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "path", [path for path in PAGES if any(runs(before) for *_, before in python_blocks(path))], ids=page_id
)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "external_model")
    namespace = {"__name__": "documentation"}
    for line, source, before in python_blocks(path):
        if runs(before):
            exec(compile("\n" * (line - 1) + source, page_id(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_what_a_page_links_to_shows_or_names_exists(path):
    text, page = FENCE.sub("", path.read_text(encoding="utf-8")), page_id(path)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else (path.parent / file).resolve()
        assert target.exists(), f"{page} links to {link}"
        assert target.is_relative_to(REPOSITORY), f"{page} links to {link}, outside the project"
        if anchor:
            assert anchor in anchors(target), f"{page} links to {link}"
    for image in IMAGE.findall(text):
        assert re.match(r"https?:", image) or (path.parent / image).is_file(), f"{page} shows {image}"
    for name in re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", text):
        if name.split("/")[0] in FOLDERS:
            assert any((folder / name).exists() for folder in (REPOSITORY, PACKAGE)), f"{page} names {name}"


def test_sampling_page_names_every_parameter():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields <= names_in_code(REPOSITORY / "docs" / "sampling.md")


def test_loading_page_names_every_argument_of_llm():
    arguments = set(inspect.signature(LLM.__init__).parameters) - {"self"}
    assert arguments <= names_in_code(REPOSITORY / "docs" / "loading.md")


def test_page_of_models_names_every_architecture_and_no_other():
    named = set(re.findall(r"`(\w+(?:For\w+|LMHeadModel))`", (REPOSITORY / "docs/models.md").read_text()))
    assert named == set(built_in_models())


def test_page_of_models_is_what_the_table_says():
    assert (REPOSITORY / "docs/models.md").read_text() == models_page(), "run python -m tools.supported_models"


def test_table_of_models_names_every_kind_of_gguf_file():
    # Encoders make vectors; docs/embeddings.md has them.
    assert {name for family in built_in_families() for name in family.gguf_architectures} == set(READ) - ENCODERS


def test_readme_says_how_many_families_there_are():
    assert f"[{len(built_in_families())} families]" in (REPOSITORY / "README.md").read_text()


def test_embeddings_page_names_every_kind_of_gguf_file_of_encoders():
    assert names_in_code(REPOSITORY / "docs" / "embeddings.md") >= ENCODERS


def test_model_page_names_every_rope_type():
    assert set(ROPE_TYPES) <= names_in_code(REPOSITORY / "docs" / "adding-a-model.md")


def test_modules_that_the_architecture_page_names_exist():
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    for name in re.findall(r"[\w/]+\.py\b", (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")):
        name = name.removeprefix("src/jaxis/")
        assert (REPOSITORY / name).exists() or any(f"/{module}".endswith(f"/{name}") for module in modules), name


def test_architecture_page_names_every_room():
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    for folder in (PACKAGE, PACKAGE / "engine", PACKAGE / "server"):
        for path in folder.iterdir():
            if path.is_dir() and path.name != "__pycache__":
                assert f"{path.name}/`" in text, path


def test_api_reference_is_what_the_docstrings_say():
    spec = importlib.util.spec_from_file_location("api_reference", REPOSITORY / "tools" / "api_reference.py")
    api_reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api_reference)
    page = api_reference.PAGE.read_text(encoding="utf-8")
    assert page == api_reference.render(), "out of date: run python tools/api_reference.py"


def test_api_reference_has_every_public_name():
    import jaxis
    import jaxis.inference

    text = (REPOSITORY / "docs/api.md").read_text(encoding="utf-8")
    for name in {*jaxis.__all__, *jaxis.inference.__all__} - {"__version__", "Role", "Type"}:
        assert f"\n### {name}\n" in text, name


def test_changelog_has_this_version_or_the_one_that_it_follows():
    first, *released = re.findall(r"^## (.+)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first == "Unreleased"
    dated = [re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", heading).groups() for heading in released]
    assert dated == sorted(dated, key=lambda entry: Version(entry[0]), reverse=True)
    newest = Version(dated[0][0])
    assert Version(__version__) > newest if Version(__version__).is_devrelease else Version(__version__) == newest


def test_the_site_has_every_page_and_its_links_lead_to_files(tmp_path):
    folder = tmp_path / "site"
    put_together(folder)
    pages = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    assert {path.name for path in (REPOSITORY / "docs").glob("*.md")} | {"index.md", "CHANGELOG.md"} <= pages
    assert "examples/external_model/README.md" in pages
    for page in pages:
        for link in LINK.findall((folder / page).read_text(encoding="utf-8")):
            target = link.partition("#")[0]
            assert ":" in link or not target or ((folder / page).parent / target).is_file(), (page, link)
