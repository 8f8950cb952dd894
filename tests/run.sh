#!/usr/bin/env bash
# Sets up and passes the tests: lint, types, and the default suite. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# A process waits for a third of its time, for starts and limits, and takes up to 4 GB.
memory_gb=$(awk '/^MemTotal/ { print int($2 / 1000000) }' /proc/meminfo)
PROCESSES=$((memory_gb < 20 ? 2 : 3)) exec bash tests/suite.sh "not slow and not long" "$@"
