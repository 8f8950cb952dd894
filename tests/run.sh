#!/usr/bin/env bash
# Sets up and passes the tests: lint, and the default suite in two processes beside types and layers. Arguments go to
# pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash cluster/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
{ .venv/bin/mypy && .venv/bin/lint-imports; } >"$scratch/checks" 2>&1 &
# The files of the tests are in memory, where thousands of a ledger's commits wait for no disk.
free_kib=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }') || true
if [ -w /dev/shm ] && [ "${free_kib:-0}" -gt $((4 << 20)) ]; then
    files=$(mktemp -d /dev/shm/privmix-tests.XXXXXX)
    trap 'rm -rf "$scratch" "$files"' EXIT
    set -- --basetemp="$files/run" "$@"
fi
status=0
bash tests/suite.sh "not slow" "$@" || status=$?
if [ "$status" -ne 0 ] && [ -n "${files-}" ]; then
    echo "The files of the tests that failed are in $files: remove them after a look, because they take memory."
    trap 'rm -rf "$scratch"' EXIT
fi
wait $! || status=1
cat "$scratch/checks"
exit "$status"
