#!/usr/bin/env bash
# Expected: torch.exp2 is elementwise, so equal numbers have equal results wherever they stand in a tensor.
# Is: with torch 2.13.0 on a CPU with AVX2, some 5 % of random float32 numbers have another last bit alone than among
#     others. Whole vectors are computed by one implementation and what is left at the end of a block by another. The
#     same holds for 2.0 ** x and for sigmoid; exp, log, log2, tanh, sin and rsqrt have the same bits everywhere.
# So: what must not depend on its neighbours to the last bit pads its tensors to whole vectors, or computes exp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
grep -q avx2 /proc/cpuinfo || { echo "this processor has no AVX2"; exit 0; }
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
ATEN_CPU_CAPABILITY=avx2 "$folder/env/bin/python" - <<'PYTHON'
import torch

print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
values = 10 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
functions = {
    "exp2": torch.exp2,
    "2.0 **": lambda x: 2.0**x,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "tanh": torch.tanh,
}
different = {}
for name, function in functions.items():
    alone = torch.cat([function(value[None]) for value in values])
    different[name] = int((function(values) != alone).sum())
print("of 2000 values have other bits alone than together:", different)
assert different["exp2"] > 20 and different["2.0 **"] > 0 and different["sigmoid"] > 0, "it has changed"
assert different["exp"] == different["tanh"] == 0, "it has changed"
PYTHON
