"""Claim: a shard's first step runs on a processor with AMX, where Linux kills a process that has not asked for it.

On other processors the tests pass without it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.counting import write_counting_model

# Only a new process has not asked. Nothing multiplies with AMX before the attention of so small a model.
FIRST_STEP = """
import sys
from pathlib import Path

import torch
from privmix.engine.engine import PUBLIC, EngineSettings, Request, create

if sys.argv[2] == "refused":
    torch.cpu._init_amx = lambda: False
engine = create(EngineSettings(Path(sys.argv[1]), "vllm", "bfloat16", 64, cache_gib=1))
print("answer", int(engine.next_token([Request("first", (100,), (PUBLIC,))]).argmax()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("amx", ["granted", "refused"])
def test_the_first_step_of_a_process_is_answered(tmp_path: Path, amx: str) -> None:
    model = write_counting_model(tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", FIRST_STEP, str(model), amx], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "answer 101"
