#!/usr/bin/env bash
# Expected: under torch.inference_mode a TorchDispatchMode sees the same operators as under torch.no_grad, and an operator
#     whose schema says that its result aliases its argument returns a view of it.
# Is: with torch 2.13.0 it sees aten.reshape itself, which no_grad decomposes into clone and _unsafe_view. Its schema says
#     that the result aliases the argument, also where the layout makes it a copy.
# So: what records operators and repeats them, leaving views out, must compare the memory and not the schema. A recorder
#     that trusts the schema repeats a step with the old values of each such copy, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        declared = all(each.alias_info is not None for each in operator._schema.returns)
        shared = result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        self.seen.append((str(operator), "alias" if declared else "new", "view" if shared else "copy"))
        return result


print("torch", torch.__version__)
transposed = torch.randn(3, 4).t()
seen = {}
for mode in (torch.no_grad, torch.inference_mode):
    with mode(), Recorder() as recorder:
        transposed.reshape(12)
    seen[mode.__name__] = recorder.seen
    print(mode.__name__, recorder.seen)
assert [name for name, _, _ in seen["no_grad"]] == ["aten.clone.default", "aten._unsafe_view.default"], "it has changed"
assert seen["inference_mode"] == [("aten.reshape.default", "alias", "copy")], "it has changed"
PYTHON
