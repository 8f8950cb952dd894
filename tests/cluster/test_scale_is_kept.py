"""Claim: a service that lost its whole cluster starts again with the shards that `privmix scale` chose."""

from pathlib import Path

import pytest

from tests.ensembles import write_ensemble
from tests.running import configure, running
from tests.support.clients import scale


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_number_of_shards_survives_the_loss_of_the_cluster(tmp_path: Path) -> None:
    ensemble = write_ensemble(tmp_path / "ensemble", 2)
    shards = {"parts_per_shard": 1, "count": 1, "num_cpus": 0, "threads": 1}
    config = configure(tmp_path, ensemble, shards=shards, engine={"context_length": 512, "cache_gib": 0.5})
    with running(config) as service:
        assert service.privacy()["event"]["parts"] == 1
        assert scale(service, 2) == 2
        service.kill_everything()
        service.start()
        assert service.privacy()["event"]["parts"] == 2
