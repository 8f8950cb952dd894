#!/usr/bin/env bash
# Updates both locks after a change of the dependencies in pyproject.toml. It keeps locked versions unless an option
# upgrades them: bash cluster/lock.sh [--check] [--upgrade | --upgrade-package NAME]
#
# --check changes nothing and fails if a lock would change. The script downloads only metadata, no wheels.
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

# The package index lacks the CPU build of torch. It comes from a local directory or from PyTorch's own index.
cpu_torch=(--torch-backend cpu)
[ -z "${PIP_FIND_LINKS-}" ] || cpu_torch=(--find-links "$PIP_FIND_LINKS")

resolve() { # ACCELERATOR OPTION...: writes the new lock and prints its path
    local accelerator=$1 lock=cluster/requirements.$1.lock made=$scratch/$1.lock
    shift
    [ ! -f "$lock" ] || cp "$lock" "$made" # uv keeps the versions in an existing output file
    "$uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --extra "$accelerator" --extra all --extra dev --generate-hashes --no-header --annotation-style line \
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
        echo "$lock does not match pyproject.toml; run: bash cluster/lock.sh" >&2
        changed=1
    fi
done
exit "$changed"
