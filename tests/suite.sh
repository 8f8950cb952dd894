#!/usr/bin/env bash
# Runs the tests of a marker expression in two processes, then repeats those that failed, one after another: a time
# limit that only a busy machine exceeded is kept then, a defect is not mended. Both results are printed.
# Usage: tests/suite.sh MARKERS [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
markers=$1
shift
status=0
# In the order of the folders, so that a process runs files that share a fixture of their package one after another.
.venv/bin/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "$markers" "$@" || status=$?
[ "$status" -eq 1 ] || exit "$status"
echo "Some tests failed. They are repeated once, one after another."
.venv/bin/pytest --last-failed --last-failed-no-failures none -m "$markers" --verbose "$@"
echo "The tests that failed above passed when repeated: mend what made them fail."
