#!/usr/bin/env bash
# Sets up and passes the tests: lint, types, and the default suite in two processes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
# The files of the tests are in memory, where thousands of a ledger's commits wait for no disk.
if [ -w /dev/shm ]; then
    files=/dev/shm/privmix-tests-$$
    trap 'rm -rf "$files"' EXIT
    set -- --basetemp="$files" "$@"
fi
bash tests/suite.sh "not slow" "$@"
