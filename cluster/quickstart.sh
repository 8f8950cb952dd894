#!/usr/bin/env bash
# Installs privmix and runs `privmix quickstart` with the given options, such as --json or --stay.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$here/cluster/install.sh" >&2
exec "$here/.venv/bin/privmix" quickstart "$@"
