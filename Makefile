# `make` lists the targets. Everything is installed into .venv. Missing Debian packages are installed only as root; otherwise the
# command to install them is printed.

VENV  := .venv
BIN   := $(VENV)/bin
DATA  ?= data
DURATION ?=
DEMO_ARGS ?=
ENGINE ?=
SERVE_ARGS ?=
PYTEST_ARGS ?= -q -n 4 --dist loadgroup
BENCH_ARGS ?= publish
KAFKA_TESTS ?= tests/engine tests/kafka tests/protocols tests/spark/sink tests/spark/test_batch_read.py tests/spark/test_stream_read.py
ROUNDS ?= 100
SEED ?= 1
FUZZ_ARGS ?= --seconds 600
SCREENSHOTS ?= screenshots
FILES ?= src tests benchmarks examples hatch_build.py

RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
MANIFESTS := pyproject.toml hashes.txt tools/setup

.DEFAULT_GOAL := help
.PHONY: help run serve test test-quick test-kafka test-kafka-faults fuzz lint format docs screenshots bench compile pure clean install

help: ## list the targets
	@echo "make TARGET [NAME=value ...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: $(RUN_STAMP) ## run the demo on DATA=data: broker, sample orders, pipeline on Spark (DURATION=60: stop after 60 s; ENGINE=kafka; DEMO_ARGS=...)
	@$(BIN)/headrace demo examples/orders/pipeline.toml --data $(DATA) $(strip $(if $(DURATION),--duration $(DURATION)) $(if $(ENGINE),--engine $(ENGINE)) $(DEMO_ARGS))

serve: $(RUN_STAMP) ## run only the broker, with all protocols, on DATA=data (SERVE_ARGS=...)
	@$(BIN)/headrace serve --data $(DATA) --listen-quic 127.0.0.1:4848 $(SERVE_ARGS)

test: $(DEV_STAMP) ## run the whole test suite (PYTEST_ARGS="-q tests/server": a part)
	@tools/setup system cc strace java chromium
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-quick: $(DEV_STAMP) ## run the tests without Spark, Kafka, browser, kill loops, crash images and those that start programs, for daily work
	@tools/setup system strace
	@$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not spark and not kafka and not browser and not kill_loop and not crash_images and not slow"

test-kafka: $(DEV_STAMP) ## run the tests of engine, protocols, Spark source and sink with a Kafka node below every broker (KAFKA_TESTS=...)
	@tools/setup system strace java
	@$(BIN)/python -m tests.kafka.run -q $(KAFKA_TESTS)

test-kafka-faults: $(DEV_STAMP) ## kill and pause Kafka nodes and both brokers under load (ROUNDS=100 SEED=1)
	@tools/setup system strace java
	@KAFKA_FAULT_ROUNDS=$(ROUNDS) KAFKA_FAULT_SEED=$(SEED) $(BIN)/python -m pytest -q tests/kafka/test_faults.py

fuzz: $(DEV_STAMP) ## fuzz all decoders, schema languages and Arrow input for ten minutes (FUZZ_ARGS="--seconds 60 --only avro")
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { sed -n '/^# \[fuzz\]/,$$p' hashes.txt >$(VENV)/fuzz.txt && \
		$(BIN)/python -m pip install -q --require-hashes --no-deps -r $(VENV)/fuzz.txt; }
	@$(BIN)/python -m tests.fuzz.run $(FUZZ_ARGS)

lint: $(DEV_STAMP) ## run ruff (rules and format) and mypy --strict
	@$(BIN)/ruff check $(FILES)
	@$(BIN)/ruff format --check $(FILES)
	@$(BIN)/mypy $(FILES)

format: $(DEV_STAMP) ## rewrite the sources as lint expects them (FILES="path ...": only these)
	@$(BIN)/ruff check --fix-only $(FILES)
	@$(BIN)/ruff format $(FILES)

docs: $(DEV_STAMP) ## regenerate docs/reference
	@$(BIN)/python -m headrace.cli.reference docs/reference

screenshots: $(DEV_STAMP) ## take screenshots of every page of the console, into SCREENSHOTS=screenshots
	@$(BIN)/python -m tests.console.screenshots $(SCREENSHOTS)

bench: $(DEV_STAMP) ## run headrace bench (BENCH_ARGS="consume --protocol figg"); internals: .venv/bin/python -m benchmarks.log|flight|quic|spark
	@$(BIN)/headrace bench $(BENCH_ARGS)

compile: $(DEV_STAMP) ## compile the hot modules into src/, for benchmarks and tests; edited sources take effect again after make pure
	@tools/setup system cc
	@HEADRACE_COMPILE=1 $(BIN)/python hatch_build.py src

pure: ## remove what make compile made
	find src -name '*.so' -delete

install: $(DEV_STAMP) ## install everything a contributor needs into .venv

clean: pure ## remove .venv, caches and build products, but not data/
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): $(MANIFESTS)
	@tools/setup system java
	@tools/setup install $(VENV) run
	@touch $@

$(DEV_STAMP): $(MANIFESTS)
	@tools/setup install $(VENV) dev
	@touch $(RUN_STAMP) $@
