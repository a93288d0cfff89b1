"""Contents of an installed jaxis, from a wheel and an sdist that are built here. Needs no network."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import jaxis
from tests.support.places import REPOSITORY

ASSETS = REPOSITORY / "src" / "jaxis" / "assets"
TOP_LEVEL = {"src", "native", "tests", "tools", "examples", "benchmarks", "docs"}
TOP_LEVEL |= {
    "Makefile",
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "CITATION.cff",
    "pyproject.toml",
    "zensical.toml",
}
TOP_LEVEL |= {"PKG-INFO", ".gitignore", ".clang-format", ".github", ".pre-commit-config.yaml"}
JUNK = (".pyc", ".log", ".tmp", "~")
LIBRARY = "jaxis/native/libjaxis.so"
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")), reason="no C++ compiler"
)


def build(folder, *hooks, **environment):
    """Runs hooks of the build backend as pip does, without an environment of its own."""
    settings = {}
    if not environment:
        # Where an editable installation has compiled the library already, for the same instruction sets.
        compiled = REPOSITORY / "build" / "native"
        settings, environment = {"build-dir": str(compiled)}, {"JAXIS_ISAS": compiled_isas(compiled)}
    calls = "; ".join(f"backend.{hook}({str(folder)!r}, {settings!r})" for hook in hooks)
    subprocess.run(
        [sys.executable, "-c", f"import scikit_build_core.build as backend; {calls}"],
        cwd=REPOSITORY,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | environment,
        check=True,
        capture_output=True,
    )
    return folder


def compiled_isas(folder):
    """The instruction sets that a build folder has kernels for; where there are none yet, this machine's best alone."""
    cache = folder / "CMakeCache.txt"
    lines = cache.read_text().splitlines() if cache.exists() else []
    return next((line.partition("=")[2] for line in lines if line.startswith("JAXIS_ISAS:")), "native")


def install(wheel, folder):
    """Installs a wheel, without what it requires, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, capture_output=True)


def run_installed(folder, code, *arguments):
    """Runs code where jaxis is what is installed in `folder`; returns what it printed."""
    required = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # -S: the import hook of an editable installation would come first.
    result = subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *required])},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder with a wheel and an sdist."""
    return build(tmp_path_factory.mktemp("dist"), "build_wheel", "build_sdist")


@pytest.fixture(scope="session")
def plain_wheel(tmp_path_factory):
    """A wheel built where there is no compiler."""
    [path] = build(tmp_path_factory.mktemp("plain"), "build_wheel", CXX="/nonexistent/c++").glob("*.whl")
    return path


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
    modules = {path.relative_to(REPOSITORY / "src").as_posix() for path in (REPOSITORY / "src").rglob("*.py")}
    assert modules <= wheel_names
    assert "jaxis/py.typed" in wheel_names


def test_the_wheel_holds_the_embedded_model(wheel, wheel_names):
    files = {path.relative_to(REPOSITORY / "src").as_posix() for path in ASSETS.rglob("*") if path.is_file()}
    assert {"jaxis/assets/tiny/config.json", "jaxis/assets/tiny/model.safetensors"} <= files
    assert files <= wheel_names
    weights = ASSETS / "tiny" / "model.safetensors"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("jaxis/assets/tiny/model.safetensors") == weights.read_bytes()


def test_the_wheel_holds_the_chat_page_and_its_libraries_licences(wheel_names):
    page = REPOSITORY / "src" / "jaxis" / "server" / "static"
    files = {path.relative_to(REPOSITORY / "src").as_posix() for path in page.rglob("*") if path.is_file()}
    assert "jaxis/server/static/index.html" in files
    assert files <= wheel_names
    licences = {PurePosixPath(name).name for name in wheel_names if ".dist-info/licenses/" in name}
    assert {"LICENSE", "LICENSE-marked.txt", "LICENSE-dompurify.txt", "LICENSE-highlight.txt"} <= licences


def test_the_wheel_holds_nothing_but_the_package(wheel_names):
    assert {PurePosixPath(name).parts[0] for name in wheel_names} == {"jaxis", f"jaxis-{jaxis.__version__}.dist-info"}
    assert not [name for name in wheel_names if name.endswith(JUNK) or "__pycache__" in name]
    assert {name for name in wheel_names if name.endswith(".so")} <= {LIBRARY}


@needs_compiler
def test_the_wheel_holds_the_native_library_and_is_of_this_platform(wheel, wheel_names):
    assert LIBRARY in wheel_names
    assert wheel.name.startswith(f"jaxis-{jaxis.__version__}-py3-none-linux_")  # ctypes loads it: any Python 3


def test_the_wheel_requires_no_torch_unless_an_extra_asks_for_it(metadata):
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert any(line.startswith("jax>=") for line in required)
    assert not [line for line in required if line.lower().startswith(("torch", "transformers", "vllm"))]
    features = {"server", "orbax", "gguf", "kv-events", "all", "ray", "cuda", "tpu", "otel"}
    features |= {"train", "tensorboard", "wandb", "vision", "vllm"}
    development = {"test", "verify", "bench", "compile-tpu", "compile-gpu"}
    assert set(metadata.get_all("Provides-Extra")) == features | development


def test_the_wheel_states_version_licence_and_python(metadata):
    assert metadata["Version"] == jaxis.__version__
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT AND BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_wheel_installs_and_imports(wheel, tmp_path):
    install(wheel, tmp_path)
    output = run_installed(tmp_path, "import jaxis; print(jaxis.__file__, jaxis.__version__)")
    assert output.split() == [str(tmp_path / "jaxis" / "__init__.py"), jaxis.__version__]
    assert (tmp_path / "bin" / "jaxis").exists()


def test_with_a_compiler_that_fails_the_wheel_is_pure_python(tmp_path):
    [wheel] = build(tmp_path, "build_wheel", CXX="false").glob("*.whl")
    assert_is_pure_python(wheel)


def test_without_a_compiler_the_wheel_is_pure_python(plain_wheel):
    assert_is_pure_python(plain_wheel)


def assert_is_pure_python(wheel):
    assert wheel.name == f"jaxis-{jaxis.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert "jaxis/llm.py" in archive.namelist()
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_an_installation_without_native_kernels_says_so_and_answers(plain_wheel, tmp_path):
    install(plain_wheel, tmp_path)
    command_line = "from jaxis.cli.main import main; main()"
    env = run_installed(tmp_path, command_line, "env")
    [line] = [line for line in env.splitlines() if line.startswith("native_kernels:")]
    assert "none: " in line
    assert str(tmp_path / LIBRARY) in line
    assert "C++17 compiler" in line
    answer = run_installed(tmp_path, command_line, "generate", "What is the capital of France?", "--temperature", "0")
    assert answer.strip() == "The capital of France is Paris."


def test_the_sdist_holds_the_sources_and_no_junk(built):
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()]
    assert {name.parts[0] for name in names} <= TOP_LEVEL
    sources = ("src/jaxis/llm.py", "tests/test_package.py", "native/CMakeLists.txt", "native/src/team.cc")
    assert {PurePosixPath(source) for source in sources} <= set(names)
    assert not [name for name in names if name.name.endswith((*JUNK, ".so")) or "__pycache__" in name.parts]
