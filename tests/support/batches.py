"""Files and batches in a store."""

import time

from privmix.batches.records import Batch, File, LineResponse, LineResult, new_id
from privmix.batches.store import BatchStore

TEXT = b'{"prompt": "Wilhelmina"}'
MAX_COUNT, MAX_FILES, DAY_S = 1000, 10, 86_400
HOLDER = "this deployment"


def put(store: BatchStore, owner: str = "alice", content: bytes = TEXT, expires_at: int | None = None) -> File:
    now = int(time.time())
    file = File(
        id=new_id("file-"),
        bytes=len(content),
        created_at=now,
        expires_at=expires_at or now + DAY_S,
        filename="in.jsonl",
        purpose="batch",
    )
    return store.put_file(owner, file, content, MAX_COUNT, MAX_FILES)


def begin(store: BatchStore, owner: str = "alice", file: File | None = None) -> Batch:
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint="/v1/completions",
        input_file_id=(file or put(store, owner)).id,
        completion_window="24h",
        created_at=now,
        expires_at=now + DAY_S,
    )
    store.put_batch(owner, batch, None, most_open=3)
    return batch


def result(custom_id: str, status: int = 200) -> LineResult:
    response = LineResponse(status_code=status, request_id="req_1", body={"text": custom_id})
    return LineResult(id=new_id("batch_req_"), custom_id=custom_id, response=response)
