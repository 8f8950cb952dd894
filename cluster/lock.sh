#!/usr/bin/env bash
# Makes the two locks again after a change in pyproject.toml's dependencies. Versions that are locked stay, unless an
# option says otherwise: bash cluster/lock.sh [--check] [--upgrade | --upgrade-package NAME]
#
# --check changes nothing and fails if a lock would change. Only metadata is downloaded, no wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

check=false
if [ "${1-}" = --check ]; then
    check=true
    shift
fi
uv=.venv/bin/uv
[ -x "$uv" ] || {
    echo "uv is not installed; run: bash cluster/install.sh" >&2
    exit 2
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# PyTorch's CPU build is not in the package index. pip's local directory has it, or uv takes it from PyTorch's index.
cpu_torch=(--torch-backend cpu)
[ -z "${PIP_FIND_LINKS-}" ] || cpu_torch=(--find-links "$PIP_FIND_LINKS")

resolve() { # ACCELERATOR OPTION...: prints where the new lock is
    local accelerator=$1 lock=cluster/requirements.$1.lock made=$scratch/$1.lock
    shift
    [ ! -f "$lock" ] || cp "$lock" "$made" # uv keeps the versions that the output file has
    "$uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --extra "$accelerator" --extra demo --extra dev --generate-hashes --no-header --annotation-style line \
        "$@" --output-file "$made" pyproject.toml >&2
    {
        echo "# Made by \`bash cluster/lock.sh\` from pyproject.toml. Do not edit: change pyproject.toml and run it again."
        cat "$made"
    } >"$made.head"
    echo "$made.head"
}

changed=0
for accelerator in cpu gpu; do
    options=("$@")
    [ "$accelerator" = gpu ] || options+=("${cpu_torch[@]}")
    made=$(resolve "$accelerator" "${options[@]}")
    lock=cluster/requirements.$accelerator.lock
    if ! "$check"; then
        mv "$made" "$lock"
    elif ! diff --unified=0 "$lock" "$made" >&2; then
        echo "$lock is not what pyproject.toml asks for; run: bash cluster/lock.sh" >&2
        changed=1
    fi
done
exit "$changed"
