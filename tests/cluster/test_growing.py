"""Claim: the ensemble doubles and halves under running streams without an effect on them, and keeps its size."""

import time
from pathlib import Path

import pytest

from tests.cluster.charges import Charges
from tests.cluster.clients import Clients
from tests.cluster.invariants import charge_violations, text_violations
from tests.counting import write_counting_model
from tests.ensembles import write_ensemble
from tests.running import configure, running, settled
from tests.support.clients import scale

PARTS_PER_SHARD = 8
PACE_S = 0.25
"""Streams must outlast the start of new shards."""
STEPS = (4, 2)
"""The numbers of shards over time, after the initial two."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_shards_join_and_leave_under_streams(tmp_path: Path) -> None:
    model = write_counting_model(tmp_path / "model")
    ensemble = write_ensemble(tmp_path / "ensemble", PARTS_PER_SHARD * max(STEPS), model=model)
    config = configure(
        tmp_path,
        ensemble,
        privacy={"q": 0.1, "tokens": 100_000},
        shards={"parts_per_shard": PARTS_PER_SHARD, "count": 2, "num_cpus": 0, "threads": 1},
        engine={"context_length": 512, "cache_gib": 0.5},
        http={"max_tokens": 400},
        coordinator={"pace_s": PACE_S},
    )
    with running(config) as service:
        clients = Clients(service.base_url)
        seen = [service.privacy()["event"]["parts"]]
        before = Charges.of(service.ledger)
        for shards in STEPS:
            with clients.streaming(max_tokens=400) as ended:
                time.sleep(2)
                assert scale(service, shards) == PARTS_PER_SHARD * shards
                seen.append(service.privacy()["event"]["parts"])
                assert not ended, "streams go on"
            assert {transcript.end for transcript in ended} <= {"length", "stop"}, "no stream failed"
        assert seen == [16, 32, 16]
        settled(service)
        assert not text_violations(clients.transcripts)
        assert not charge_violations(before, Charges.of(service.ledger), clients.transcripts, parts=seen)
        assert scale(service, STEPS[0]) == PARTS_PER_SHARD * STEPS[0]
        service.kill_everything()
        service.start()
        assert service.privacy()["event"]["parts"] == PARTS_PER_SHARD * STEPS[0], "it survives the loss of the cluster"
