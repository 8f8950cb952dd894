#!/usr/bin/env bash
# Sets up and passes the tests: lint, types, and the default suite in two processes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
# Where memory has room, the files of the tests are there: thousands of a ledger's commits wait for no disk.
if [ -w /dev/shm ] && [ "$(df --output=avail /dev/shm | tail -1)" -gt 4000000 ]; then
    files=/dev/shm/privmix-tests-$$
    trap 'rm -rf "$files"' EXIT
    set -- --basetemp="$files" "$@"
fi
bash tests/suite.sh "not slow" "$@"
