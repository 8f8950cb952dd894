#!/usr/bin/env bash
# From a fresh checkout to a private answer over HTTP. Options: --json, --stay; see `privmix quickstart --help`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$here/cluster/install.sh" >&2
exec "$here/.venv/bin/privmix" quickstart "$@"
