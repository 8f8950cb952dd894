"""Claim: without a running service, a batch waits, can be cancelled, and survives a restart of the batches actor."""

import asyncio
import json
import pickle
from pathlib import Path

import pytest

from services.batches import actor
from services.batches.actor import Batches
from services.batches.records import Batch, BatchesError, BatchRequest
from services.batches.settings import BatchSettings
from services.ensembles.records import Ensemble
from services.requests.settings import RequestSettings
from services.training import public_model

pytestmark = pytest.mark.anyio

BODY = {"model": "privmix", "prompt": "p", "max_tokens": 1}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def start(place: Path, holder: str = "this") -> Batches:
    namespace = "a-namespace-without-actors"
    ensemble = Ensemble(names=("privmix",), namespace=namespace, model=public_model.resolve(), context_length=512)
    requests = RequestSettings(namespace=namespace, ensembles=(ensemble,), keys_actor="keys")
    batches = Batches(str(place), BatchSettings(), pickle.dumps(requests), capacity=4, holder=holder)
    batches._route_serves.set()
    return batches


async def begin(batches: Batches, *, content: bytes | None = None) -> Batch:
    file = await batches.upload("alice", "in.jsonl", json.dumps(LINE).encode() if content is None else content, None)
    request = BatchRequest(endpoint="/v1/completions", input_file_id=file.id, completion_window="24h", window_s=86_400)
    return await batches.create("alice", request)


async def until(batches: Batches, id_: str, *statuses: str) -> Batch:
    async with asyncio.timeout(60):
        while (batch := await batches.batch("alice", id_)).status not in statuses:
            await asyncio.sleep(0.05)
    return batch


async def test_a_batch_waits_for_the_service_is_resumed_and_cancelled(tmp_path: Path) -> None:
    batches = start(tmp_path / "keys.db")
    batch = await until(batches, (await begin(batches)).id, "in_progress")
    assert (batch.request_counts.total, batch.request_counts.failed) == (1, 0)
    restarted = start(tmp_path / "keys.db")
    with pytest.raises(BatchesError, match="cancel it first"):
        await restarted.delete_file("alice", batch.input_file_id)
    await restarted.cancel("alice", batch.id)
    done = await until(restarted, batch.id, "cancelled")
    assert done.output_file_id is None
    assert done.error_file_id is not None
    (missing,) = (await restarted.content("alice", done.error_file_id)).splitlines()
    assert json.loads(missing)["error"]["code"] == "batch_cancelled"
    assert (await restarted.cancel("alice", batch.id)) == done, "a batch that has ended does not change"
    await restarted.delete_file("alice", batch.input_file_id)


def runs(batches: Batches, batch: Batch) -> bool:
    return batches._runner is not None and batch.id in batches._runner._jobs


async def test_a_new_deployment_runs_no_batch_before_it_serves_and_while_another_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open batch of the old deployment used to be resumed by the new one before it served, which took the ledger."""
    monkeypatch.setattr(actor, "LEASE_RENEWAL_S", 0.1)
    old = start(tmp_path / "keys.db", "old")
    batch = await until(old, (await begin(old)).id, "in_progress")
    new = start(tmp_path / "keys.db", "new")
    new._route_serves.clear()
    await asyncio.sleep(1.5)
    assert not runs(new, batch), "it does not serve yet"
    await new.serving()
    await asyncio.sleep(1.5)
    assert not runs(new, batch), "the old deployment runs the batches"
    second = await begin(new)
    await until(new, second.id, "in_progress")
    assert not runs(new, second), "the old deployment runs the new batch too"
    await new.cancel("alice", second.id)
    await until(new, second.id, "cancelled")
    await old.release()
    async with asyncio.timeout(60):
        while not runs(new, batch):
            await asyncio.sleep(0.05)
    await new.cancel("alice", batch.id)
    await until(new, batch.id, "cancelled")


async def test_a_file_without_requests_fails_its_batch(tmp_path: Path) -> None:
    batches = start(tmp_path / "keys.db")
    failed = await until(batches, (await begin(batches, content=b"x")).id, "failed")
    assert failed.errors is not None
    assert [(error.code, error.line) for error in failed.errors.data] == [("invalid_json_line", 1)]
