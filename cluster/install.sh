#!/usr/bin/env bash
# Makes .venv in the checkout, or reuses it, with exactly the versions of requirements.lock. Safe to interrupt and repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || {
    echo "privmix needs Python 3.11 or newer; found $("$python" --version). Set PYTHON to one." >&2
    exit 1
}

wanted=$(cat cluster/requirements.lock pyproject.toml cluster/install.sh | sha256sum)
mark=.venv/installed
if [ -f "$mark" ] && [ "$(cat "$mark")" = "$wanted" ]; then
    exit 0
fi

echo "Installing privmix into .venv (a few minutes the first time)"
rm -f "$mark"
[ -x .venv/bin/pip ] || { rm -rf .venv && "$python" -m venv .venv; }
pip=(.venv/bin/pip --disable-pip-version-check --quiet --quiet install)
echo "  torch (CPU build)"
"${pip[@]}" "torch==2.13.0"
echo "  $(grep -c == cluster/requirements.lock) locked packages"
"${pip[@]}" --no-deps -r cluster/requirements.lock
"${pip[@]}" --no-deps --no-build-isolation -e .
.venv/bin/python -c 'import torch, transformers, vllm, ray' || {
    echo "The installation does not import; remove .venv and run this again." >&2
    exit 1
}
printf '%s\n' "$wanted" >"$mark"
