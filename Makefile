# `make demo` and `make test` need nothing but Python 3.11 or newer: each creates .venv and
# installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
DEMO := .demo

.PHONY: help demo test lint types contract unit integrations coverage pictures constants test-variants test-slow bench-analyze bench-ho-ring bench-training bench-prediction bench-loop bench-search bench-placement bench-truth bench-public bench-invariants bench-host bench-host-parameters bench-memory bench-start bench-watch bench-overhead bench-hang bench-fleet bench-at-scale bench-sampling fuzz gpu structure reference docs gallery zensical man dist api clean

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the demo needs (once, a minute or two) ..."
	$(PIP) --editable '.[runtime,fast]'
	@touch $@

.venv/test.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what the tests need (once, a few minutes) ..."
	$(PIP) --editable '.[runtime,hta,apply,fast,test]'
	@touch $@ .venv/demo.stamp

demo: .venv/demo.stamp ## The whole loop on an emulated cluster: capture, recommend, run, compare (3 minutes)
	$(BIN)/paro-advise demo -o $(DEMO) --force

test: lint types contract unit ## Run all checks: ruff, strict typing, import contract, tests

lint: .venv/test.stamp ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp ## Strict typing; tests and benchmarks by tests/mypy.ini
	$(BIN)/mypy -p paro_advise
	$(BIN)/mypy --config-file tests/mypy.ini tests/*.py benchmarks/*.py

contract: .venv/test.stamp ## Imports between the rooms and inside them
	$(BIN)/lint-imports --config pyproject.toml --no-cache
	$(BIN)/lint-imports --config layers.toml --no-cache

unit: .venv/test.stamp ## Tests
	$(BIN)/python -m pytest -n 3 --dist worksteal

# In an environment of their own: frameworks pin each other's versions.
.venv-integrations/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-integrations
	@echo "installing the frameworks (once, some minutes) ..."
	.venv-integrations/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[runtime,apply,fast,integrations]' setuptools wheel ninja
	.venv-integrations/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	@touch $@

integrations: .venv-integrations/stamp ## Each framework's own training loop through capture, plan and comparison (5 minutes)
	.venv-integrations/bin/python -m pytest tests/test_integrations.py

coverage: .venv/test.stamp ## Tests with branch coverage of everything that runs without a GPU (20 minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' --cov --cov-report=term:skip-covered

structure: .venv/test.stamp ## Sizes of files and functions, rooms, floors, uses of Any
	$(BIN)/python benchmarks/structure.py

pictures: .venv/test.stamp ## Draw the pictures anew that pages are compared with (needs Chromium)
	PARO_ADVISE_NEW_PICTURES=1 $(BIN)/python -m pytest -n 2 tests/test_pages.py -k look

constants: .venv/test.stamp ## Write docs/constants.md from the code
	$(BIN)/python benchmarks/list_constants.py > docs/constants.md

reference: .venv/test.stamp ## Write docs/commands.md and docs/codes.md from the code
	$(BIN)/python benchmarks/reference.py

docs: .venv/docs.stamp ## The documentation as a site in .site, without a request to anywhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.venv/release.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[release]'
	@touch $@

# Archives hold one time, that of the commit, so that the wheel is the same wherever it is built.
dist: .venv/release.stamp ## Wheel, source distribution, and one file for clusters without a network, in .dist
	rm -rf .dist build
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir .dist
	$(BIN)/pex "$$(ls .dist/*.whl)[fast,apply,cloud,metrics]" --constraints constraints.txt --console-script paro-advise --output-file .dist/paro-advise.pex

api: .venv/release.stamp ## What changed in the public Python interface since the newest tag, or SINCE=REVISION
	$(BIN)/python benchmarks/api_changes.py $(SINCE)

gallery: .venv/test.stamp demo ## Make the reports and pictures of docs/gallery.md anew (needs Chromium; 5 minutes)
	$(BIN)/python benchmarks/gallery.py

zensical: .venv/docs.stamp ## The same site by Zensical
	$(BIN)/zensical build --strict

man: .venv/docs.stamp ## A man page for each verb in .man
	$(BIN)/python benchmarks/man_pages.py .man

.venv/docs.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[docs]'
	@touch $@

test-variants: .venv/test.stamp ## Other forms of what `make test` holds, and what takes long: whole recordings, more ranks, other orders (6 minutes)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m variant

test-slow: .venv/test.stamp ## The long runs of sharding, and the jobs that pages start (an hour)
	$(BIN)/python -m pytest -m slow

bench-analyze: .venv/test.stamp ## Speed, memory, scale and cache beside HTA and simdjson (half an hour)
	$(BIN)/python benchmarks/bench_analyze.py

bench-ho-ring: .venv/test.stamp ## HO-Ring beside gloo, two hops and a plain ring on the emulated cluster (10 minutes)
	$(BIN)/python benchmarks/bench_ho_ring.py

# DeepSpeed's set-up reads the installed torch.
.venv/peers.stamp: .venv/test.stamp
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation deepspeed accelerate lightning
	@touch $@

bench-training: .venv/peers.stamp ## Our strategies beside DDP, FSDP2 and DeepSpeed on the emulated cluster (15 minutes)
	$(BIN)/python benchmarks/bench_training.py

bench-prediction: .venv/test.stamp ## Predictions from one trace beside measured runs on the emulated cluster (half an hour)
	$(BIN)/python benchmarks/bench_prediction.py

bench-host: .venv/peers.stamp ## What frameworks do on the host beside a model's operators
	$(BIN)/python benchmarks/bench_host.py

bench-host-parameters: .venv/test.stamp ## What thousands of small parameters cost the host, plain, under FSDP2 and under plans (4 minutes)
	$(BIN)/python benchmarks/bench_host_parameters.py

bench-memory: .venv/test.stamp ## The memory that a plan expects beside what training takes (12 minutes)
	$(BIN)/python benchmarks/bench_memory.py

bench-start: .venv/test.stamp ## What an FSDP2 script that starts on the meta device takes, plain and planned (7 minutes)
	$(BIN)/python benchmarks/bench_start.py

bench-loop: .venv/peers.stamp ## Ten loops and 200 comparisons on the emulated cluster (half an hour)
	$(BIN)/python benchmarks/bench_loop.py

bench-search: .venv/test.stamp ## Time of the search up to 1,024 ranks
	$(BIN)/python benchmarks/bench_search.py

bench-placement: .venv/test.stamp ## Slow nodes in one group or apart, on the emulated cluster (20 minutes)
	$(BIN)/python benchmarks/bench_placement.py

gpu: .venv/test.stamp ## All that only a GPU can tell, on one GPU; without one it says what it skips (8 minutes)
	$(BIN)/python benchmarks/gpu.py

bench-at-scale: .venv/test.stamp ## What a rank's host does beside up to 1,023 others that are not there (6 minutes)
	$(BIN)/python benchmarks/bench_at_scale.py

bench-truth: .venv/test.stamp ## Predictions beside the known outcomes of synthetic NCCL runs, from ../shared (2 minutes)
	$(BIN)/python benchmarks/bench_truth.py

bench-public: .venv/test.stamp ## Predictions from descriptions beside public runs on H100 clusters, from ../shared (half a minute)
	$(BIN)/python benchmarks/bench_public.py

bench-invariants: .venv/test.stamp ## What every prediction must keep, on 10,000 random runs (10 minutes)
	$(BIN)/python benchmarks/bench_invariants.py

bench-sampling: .venv/test.stamp ## How often the range of a sample of ranks holds the mean of all (20 seconds)
	$(BIN)/python benchmarks/bench_sampling.py

bench-fleet: .venv/test.stamp ## Joining up to 10,000 ranks, and one run by every engine (15 minutes)
	$(BIN)/python benchmarks/bench_fleet.py scale
	$(BIN)/python benchmarks/bench_fleet.py engines

bench-watch: .venv/test.stamp ## How soon `watch` tells of a port that becomes slow, on the emulated cluster (20 minutes)
	$(BIN)/python benchmarks/bench_watch.py

bench-overhead: .venv/test.stamp ## What `watch` and `export` take from the steps of a running job (13 minutes)
	$(BIN)/python benchmarks/bench_overhead.py

bench-hang: .venv/test.stamp ## 200 jobs that are made to hang, and who is blamed (11 minutes)
	$(BIN)/python benchmarks/bench_hang.py --hangs 200 --seed 71000

fuzz: .venv/test.stamp ## 10,000 damaged inputs of every format through the command line (10 minutes)
	$(BIN)/python benchmarks/fuzz_readers.py

clean: ## Remove everything that make created
	rm -rf .venv .venv-integrations build .site .man .dist $(DEMO) .bench .mypy_cache .ruff_cache .pytest_cache
