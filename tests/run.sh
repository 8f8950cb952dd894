#!/usr/bin/env bash
# Sets up and passes the tests: lint, types, and the default suite in two processes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
exec bash tests/suite.sh "not slow" "$@"
