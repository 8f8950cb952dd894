#!/usr/bin/env bash
# Expected: a Ray Serve application that starts on a port where another Ray cluster of the same machine serves fails, as
#     every other server does, with "address already in use".
# Is: with ray 2.60.0 both start without a warning. The proxies set SO_REUSEPORT, so Linux divides the connections: a client
#     of the first application gets some of its answers from the second.
# So: what serves for one group of clients must check that the port is free before it starts Serve.
#     SERVE_SOCKET_REUSE_PORT_ENABLED=0 refuses the second, but also a restart while ended connections hold the port.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "ray[serve]==2.60.0"
cat > "$folder/app.py" <<'PYTHON'
import sys
import time

import ray
from ray import serve
from ray.serve.config import HTTPOptions


@serve.deployment
class Named:
    def __init__(self, name):
        self.name = name

    async def __call__(self, request):
        return self.name


name, port = sys.argv[1], int(sys.argv[2])
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
serve.run(Named.bind(name))
print("serving", name, flush=True)
time.sleep(600)
PYTHON
port=$("$folder/env/bin/python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
export RAY_USAGE_STATS_ENABLED=0
for name in first second; do
    "$folder/env/bin/python" "$folder/app.py" "$name" "$port" >"$folder/$name.log" 2>&1 &
    for _ in $(seq 120); do
        grep -q "^serving $name" "$folder/$name.log" && break
        sleep 1
    done
    grep "^serving $name" "$folder/$name.log"
done
"$folder/env/bin/python" - "$port" <<'PYTHON'
import collections
import sys
import urllib.request

import ray

url = f"http://127.0.0.1:{sys.argv[1]}/"
answers = collections.Counter(urllib.request.urlopen(url).read().decode() for _ in range(64))
print("ray", ray.__version__, dict(answers))
assert set(answers) == {"first", "second"}, "it has changed"
PYTHON
