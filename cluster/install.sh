#!/usr/bin/env bash
# Makes the virtual environment .venv, or reuses it, with exactly the versions of one lock. Safe to interrupt and repeat.
#
#   bash cluster/install.sh [--accelerator cpu|gpu] [--dry-run]
#
# Without --accelerator: what .venv was made for, else gpu where the machine has an NVIDIA GPU, else cpu.
# PYTHON names the interpreter. --environment DIR --no-project is for the image: another place, and the packages alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

accelerator='' dry_run=false environment=.venv project=true
while [ $# -gt 0 ]; do
    case "$1" in
        --accelerator) accelerator=${2-} && shift ;;
        --accelerator=*) accelerator=${1#*=} ;;
        --environment) environment=${2-} && shift ;;
        --no-project) project=false ;;
        --dry-run) dry_run=true ;;
        *)
            echo "There is no option $1; there are --accelerator, --dry-run, --environment and --no-project." >&2
            exit 2
            ;;
    esac
    shift || true
done

has_gpu() {
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU '
}

made_for=$environment/accelerator
if [ -z "$accelerator" ]; then
    if [ -f "$made_for" ]; then
        accelerator=$(cat "$made_for")
    elif has_gpu; then
        accelerator=gpu
    else
        accelerator=cpu
    fi
fi
lock=cluster/requirements.$accelerator.lock
[ -f "$lock" ] || {
    echo "--accelerator is cpu or gpu, not '$accelerator'." >&2
    exit 2
}

if "$dry_run"; then
    echo "Would install into $environment for $accelerator, from $lock:"
    sed -n 's/^\([^ #]*==[^ ]*\).*/  \1/p' "$lock"
    exit 0
fi

python=${PYTHON:-python3}
mark=$environment/installed
wanted=$(cat "$lock" pyproject.toml cluster/install.sh | sha256sum)
if [ -f "$mark" ] && [ "$(cat "$mark")" = "$wanted" ]; then
    exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "privmix is locked for Python 3.11; found $("$python" --version). Set PYTHON to one." >&2
    exit 1
}

echo "Installing privmix for $accelerator into $environment (a few minutes the first time)"
# The two builds of vLLM are the same Python package: one is not installed over the other.
[ ! -f "$made_for" ] || [ "$(cat "$made_for")" = "$accelerator" ] || rm -rf "$environment"
rm -f "$mark"
[ -x "$environment/bin/pip" ] || { rm -rf "$environment" && "$python" -m venv "$environment"; }
echo "$accelerator" >"$made_for"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
pip=("$environment/bin/pip" --disable-pip-version-check --quiet --quiet install)
uv=("$environment/bin/uv" pip install --quiet --system-certs --python "$environment/bin/python")
locked=(--no-deps --require-hashes --requirement)
awk '/^[a-z0-9]/ { wanted = /^uv==/ } wanted' "$lock" >"$scratch/uv"
"${pip[@]}" "${locked[@]}" "$scratch/uv"
# The package index lacks the CPU build of torch: a machine's own directory has it, or PyTorch's index, which uv knows.
if [ -n "${PIP_FIND_LINKS-}" ]; then
    uv+=(--find-links "$PIP_FIND_LINKS")
elif [ "$accelerator" = cpu ]; then
    uv+=(--torch-backend cpu)
fi
echo "  $(grep -c '^[a-z0-9].*==' "$lock") locked packages"
# uv is faster; pip knows what else this machine's configuration says, a mirror for instance.
"${uv[@]}" "${locked[@]}" "$lock" || "${pip[@]}" "${locked[@]}" "$lock"
if "$project"; then
    "${pip[@]}" --no-deps --no-build-isolation --editable .
fi
"$environment/bin/python" -c 'import torch, transformers, vllm, ray' || {
    echo "The installation does not import; remove $environment and run this again." >&2
    exit 1
}
printf '%s\n' "$wanted" >"$mark"
