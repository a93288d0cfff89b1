# Everything happens in .venv, which the first target that needs it makes. PYTHON=/path/to/python chooses another Python.

VENV := .venv
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
QUESTION ?= What is the capital of France?
# Workers of pytest. Each compiles its own programs, so a file's tests stay on one worker; each takes up to 2 GB, and the
# processes that it starts up to 1 GB more.
PYTEST_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 4 ? 4 : n)))

# What an installation builds: changed, it is installed again.
BUILT_FROM := pyproject.toml $(shell find native/CMakeLists.txt native/src -type f)
# What test-native looks for errors with: nothing, address,undefined (memory, undefined behaviour) or thread (data races).
SANITIZE ?=
# Without, they are linked with the kernels that the installation of `make test` compiled, in its own folder.
NATIVE_TESTS := build/native$(if $(SANITIZE),-$(SANITIZE))
COMPILER := $(shell command -v $(CXX) || command -v c++ || command -v clang++)

# The GPUs to compile for: a process can compile for one kind only.
GPU_TARGETS ?= h100 a100
COMPILERS := build/compilers

# What `make test-compile` has installed: tpu, gpu.
INSTALLED_COMPILERS := $(patsubst $(COMPILERS)/%/.installed,%,$(wildcard $(COMPILERS)/*/.installed))
SITE_BUILDER := build/site-builder
VLLM := build/vllm
COMPILE_TESTS := tests/compile tests/kernels tests/compilation
ISA_TESTS := tests/test_llm.py tests/test_embedded_model.py tests/engine/test_batch_invariance.py

NATIVE_SOURCES := $(shell find native -name '*.h' -o -name '*.cc')

# Several targets install into one environment.
.NOTPARALLEL:

.PHONY: help demo test test-native test-sanitizers test-slow test-compile test-real nightly lint format docs bench compare clean

help:
	@echo "make demo       install into $(VENV), then let the embedded model answer a question"
	@echo "make test       install what the tests need, then lint and test; also compiles for TPUs and GPUs where test-compile"
	@echo "                has installed their compilers"
	@echo "make test-isas  tests of the engine on each instruction set that this machine has"
	@echo "make test-native  the C++ tests; SANITIZE=address,undefined or SANITIZE=thread runs them under a sanitizer"
	@echo "make test-sanitizers  the C++ tests under each sanitizer; takes some minutes"
	@echo "make test-slow  the tests that take long, and the rows of others that the quick ones leave out"
	@echo "make test-compile  the tests that compile for TPUs and GPUs, without one; installs their compilers (1.5 GB) into $(COMPILERS)"
	@echo "make test-vllm  the tests of jaxis inside vLLM, which it installs (700 MB) into $(VLLM)"
	@echo "make test-real  the tests of published models, which they download (a few hundred megabytes, kept)"
	@echo "make nightly    all of it: test, test-slow, test-compile, test-sanitizers and release-check"
	@echo "make lint       check the code with ruff, its types with basedpyright and its format with ruff and clang-format,"
	@echo "                and the workflows with zizmor"
	@echo "make format     let ruff correct and format the Python code, and clang-format format the C++ code"
	@echo "make docs       the documentation as a site with a search, in build/site; fails on a broken link"
	@echo "make bench      start-up, prefill, decode and memory of a Qwen3-0.6B-shaped model; ARGS=... for options"
	@echo "make compare    the same beside transformers, llama.cpp (compiles it, takes long) and ik_llama.cpp, whose tools are in"
	@echo "                the folder IK_LLAMA_CPP; ARGS=... likewise"
	@echo "make release-check  build the sdist and the wheel, and try the wheel in a fresh environment"
	@echo "make wheels     the wheels of a release, for Linux on x86-64 and Arm and for macOS, into dist; needs Debian's"
	@echo "                g++ and g++-aarch64-linux-gnu; ARGS='--only x86_64' for one of them"
	@echo "make clean      remove $(VENV) and what builds and tests left"

demo: $(VENV)/.installed
	@echo "Question: $(QUESTION)"
	@printf 'Answer:   '
	@$(VENV)/bin/jaxis generate "$(QUESTION)" --temperature 0

test: lint $(if $(COMPILER),test-native) test-python
	@$(MAKE) --no-print-directory test-compile-quick

.PHONY: test-python test-isas
test-python: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(ARGS)

# Tests of single kernels run on every instruction set in `make test` already.
test-isas: $(VENV)/.installed-test
	@set -e; for isa in $$($(VENV)/bin/python -c 'from tests.support import isa; print(*isa.isas())'); do \
		echo "JAXIS_CPU_ISA=$$isa"; JAXIS_CPU_ISA=$$isa $(VENV)/bin/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(ISA_TESTS) $(ARGS); done

test-native: $(VENV)/.installed
	$(VENV)/bin/cmake -S native -B $(NATIVE_TESTS) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
		-DJAXIS_ISAS=all -DJAXIS_FFI=$(if $(SANITIZE),OFF,ON) -DJAXIS_TESTS=ON -DJAXIS_SANITIZE=$(SANITIZE)
	$(VENV)/bin/cmake --build $(NATIVE_TESTS)
	$(VENV)/bin/ctest --test-dir $(NATIVE_TESTS) --output-on-failure

# One after the other: each compiles the kernels for every instruction set, and runs them on those of the machine.
test-sanitizers:
	$(MAKE) test-native SANITIZE=address,undefined
	$(MAKE) test-native SANITIZE=thread

test-slow: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -m 'slow and not compile_tpu and not compile_gpu' -n $(PYTEST_WORKERS) --dist loadfile $(ARGS)

# One process after the other: libtpu takes half a gigabyte. XLA optimizes here, as it does for users.
test-compile: test-compile-tpu test-compile-gpu

.PHONY: test-compile-tpu test-compile-gpu
test-compile-tpu: $(COMPILERS)/tpu/.installed
	JAX_PLATFORMS=cpu XLA_FLAGS= $(COMPILERS)/tpu/bin/python -m pytest -m compile_tpu $(ARGS)

test-compile-gpu: $(COMPILERS)/gpu/.installed
	@set -e; for target in $(GPU_TARGETS); do \
		echo "JAX_PLATFORMS=cpu XLA_FLAGS= $(COMPILERS)/gpu/bin/python -m pytest -m compile_gpu --gpu-target $$target $(ARGS)"; \
		JAX_PLATFORMS=cpu XLA_FLAGS= $(COMPILERS)/gpu/bin/python -m pytest -m compile_gpu --gpu-target $$target $(ARGS); done

# Those of a minute or two, where the compilers are there.
.PHONY: test-compile-quick
test-compile-quick:
ifneq ($(filter tpu,$(INSTALLED_COMPILERS)),)
	JAX_PLATFORMS=cpu XLA_FLAGS= $(COMPILERS)/tpu/bin/python -m pytest -m 'compile_tpu and not slow' $(COMPILE_TESTS)
else
	@echo "No program was compiled for a TPU: make test-compile installs libtpu, and make test then uses it"
endif
ifneq ($(filter gpu,$(INSTALLED_COMPILERS)),)
	JAX_PLATFORMS=cpu XLA_FLAGS= $(COMPILERS)/gpu/bin/python -m pytest -m 'compile_gpu and not slow' $(COMPILE_TESTS)
else
	@echo "No program was compiled for a GPU: make test-compile installs XLA's CUDA plugin, and make test then uses it"
endif

# Unset: the tests say which plugins vLLM loads.
.PHONY: test-vllm
test-vllm: $(VLLM)/.installed
	env -u VLLM_PLUGINS $(VLLM)/bin/python -m pytest tests/integrations/vllm $(ARGS)

test-real: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -m real $(ARGS)

nightly: test test-slow test-compile test-sanitizers docs release-check

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright
	$(VENV)/bin/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	$(VENV)/bin/zizmor --offline --quiet --min-severity medium .github

format: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(NATIVE_SOURCES)

docs: $(SITE_BUILDER)/.installed
	$(SITE_BUILDER)/bin/python tools/docs_site.py build/docs
	$(SITE_BUILDER)/bin/zensical build --strict
	@echo "The site is at file://$(CURDIR)/build/site/index.html"

bench: $(VENV)/.installed
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		$(VENV)/bin/python benchmarks/random_checkpoint.py "$$folder/qwen3-0.6b" && \
		$(VENV)/bin/jaxis bench latency "$$folder/qwen3-0.6b" $(ARGS)

compare: $(VENV)/.installed-bench
	$(VENV)/bin/python benchmarks/compare.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles a package to bytecode when it is first imported. pip would compile all of them, most of which no answer needs.
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --no-compile

# The build's requirements go into the environment, not into one of their own that pip would make for the build alone: the
# largest, jaxlib, is needed anyway.
$(VENV)/.made: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxis needs Python 3.11 or newer and found none: install it, or give PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --upgrade pip
	@$(VENV)/bin/python tools/requirements.py --build > $(VENV)/build-requirements.txt
	@$(PIP_INSTALL) --requirement $(VENV)/build-requirements.txt
	@touch $@

# Builds jaxis, and installs what it requires with the extra $(1) meanwhile: one keeps a core busy, the other the others.
define install
@$(VENV)/bin/python tools/requirements.py $(1) > $(VENV)/requirements.txt
@$(PIP_INSTALL) --requirement $(VENV)/requirements.txt & requirements=$$!; trap "kill $$requirements" INT TERM; \
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable .; built=$$?; \
	wait $$requirements && exit $$built
endef

$(VENV)/.installed: $(VENV)/.made $(BUILT_FROM)
	@echo "Installing jaxis into $(VENV), once"
	$(call install,all)
	@touch $@

# All that .installed brings, and more: not one after the other, or jaxis would be built twice.
$(VENV)/.installed-test: export JAXIS_ISAS = all
$(VENV)/.installed-test: $(VENV)/.made $(BUILT_FROM)
	@echo "Installing jaxis and what the tests need into $(VENV), with the kernels for every instruction set, once"
	$(call install,test)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@echo "Installing the engines to compare with into $(VENV), once"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[bench]'
	@touch $@

$(SITE_BUILDER)/.installed:
	@$(PYTHON) -m venv $(SITE_BUILDER)
	@$(SITE_BUILDER)/bin/python -m pip install --quiet 'zensical>=0.0.70,<1'
	@touch $@

$(VENV)/.installed-wheels: $(VENV)/.made
	@$(VENV)/bin/python -m pip install --quiet 'ziglang>=0.17,<0.18' 'auditwheel>=6.8,<7'
	@touch $@

# An environment that has a compiler, and sees all that $(VENV) has.
$(COMPILERS)/%/.installed: $(VENV)/.installed-test
	@echo "Installing the compiler of $*s into $(@D), once"
	@$(VENV)/bin/python -m venv $(@D)
	@$(VENV)/bin/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tests.pth"
	@$(@D)/bin/python -m pip install --quiet 'jaxis[compile-$*]'
	@touch $@

# An environment that has vLLM, in front of all that $(VENV) has: some of its requirements are older.
$(VLLM)/.installed: $(VENV)/.installed-test tests/integrations/vllm/requirements.txt
	@echo "Installing vLLM into $(@D), once"
	@$(VENV)/bin/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --no-deps -r tests/integrations/vllm/requirements.txt
	@$(VENV)/bin/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tests.pth"
	@touch $@

# Builds them with the compilers of tools/wheels.py, and checks what they need of a system.
.PHONY: wheels
wheels: $(VENV)/.installed-wheels
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python tools/wheels.py dist $(ARGS)

# Releasing: builds the sdist, a wheel from the sdist, and tries the wheel in an environment that has nothing else. All of it
# happens in a temporary folder. See CONTRIBUTING.md.
.PHONY: release-check
release-check:
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && set -e && \
		$(PYTHON) -m venv "$$folder/build" && "$$folder/build/bin/python" -m pip install --quiet build && \
		echo "Building the sdist, and the wheel from it" && \
		"$$folder/build/bin/python" -m build --outdir "$$folder/dist" . > "$$folder/build.log" 2>&1 || \
			{ tail -n 30 "$$folder/build.log" >&2; exit 1; } && \
		ls "$$folder/dist" && \
		echo "Installing the wheel into a fresh environment" && \
		$(PYTHON) -m venv "$$folder/clean" && "$$folder/clean/bin/python" -m pip install --quiet "$$folder"/dist/*.whl && \
		cd "$$folder" && unset PYTHONPATH && clean/bin/jaxis env && \
		answer=$$(clean/bin/jaxis generate "What is the capital of France?" --temperature 0) && echo "$$answer" && \
		case "$$answer" in *Paris*) ;; *) echo "release-check: the installed wheel does not answer Paris" >&2; exit 1;; esac
