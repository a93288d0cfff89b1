"""What an installed jaxis holds, from a wheel and an sdist that are built here. Needs no network."""

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import jaxis

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "src" / "jaxis" / "assets"
TOP_LEVEL = {"src", "tests", "examples", "benchmarks", "docs"}
TOP_LEVEL |= {"Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
TOP_LEVEL |= {"PKG-INFO", ".gitignore"}
JUNK = (".pyc", ".so", ".log", ".tmp", "~")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="session")
def wheel(built):
    [path] = built.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def wheel_names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def metadata(wheel, wheel_names):
    [name] = [name for name in wheel_names if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_module_and_the_type_marker(wheel_names):
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert modules <= wheel_names
    assert "jaxis/py.typed" in wheel_names


def test_the_wheel_holds_the_embedded_model(wheel, wheel_names):
    files = {path.relative_to(ROOT / "src").as_posix() for path in ASSETS.rglob("*") if path.is_file()}
    assert {"jaxis/assets/tiny/config.json", "jaxis/assets/tiny/model.safetensors"} <= files
    assert files <= wheel_names
    weights = ASSETS / "tiny" / "model.safetensors"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("jaxis/assets/tiny/model.safetensors") == weights.read_bytes()


def test_the_wheel_holds_nothing_but_the_package(wheel_names):
    assert {PurePosixPath(name).parts[0] for name in wheel_names} == {"jaxis", f"jaxis-{jaxis.__version__}.dist-info"}
    assert not [name for name in wheel_names if name.endswith(JUNK) or "__pycache__" in name]


def test_the_wheel_requires_no_torch_unless_an_extra_asks_for_it(metadata):
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert any(line.startswith("jax>=") for line in required)
    assert not [line for line in required if line.lower().startswith(("torch", "transformers", "vllm"))]
    assert set(metadata.get_all("Provides-Extra")) == {"cuda", "tpu", "test", "bench"}


def test_the_wheel_states_version_licence_and_python(metadata):
    assert metadata["Version"] == jaxis.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_wheel_installs_and_imports(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jaxis; print(jaxis.__file__, jaxis.__version__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert result.stdout.split() == [str(tmp_path / "jaxis" / "__init__.py"), jaxis.__version__]
    assert (tmp_path / "bin" / "jaxis").exists()


def test_the_sdist_holds_the_sources_and_no_junk(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()]
    assert {name.parts[0] for name in names} <= TOP_LEVEL
    assert {PurePosixPath("src/jaxis/llm.py"), PurePosixPath("tests/test_package.py")} <= set(names)
    assert not [name for name in names if name.name.endswith(JUNK) or "__pycache__" in name.parts]
