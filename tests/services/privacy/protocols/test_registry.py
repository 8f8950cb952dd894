"""Claims that hold for every protocol of the registry."""

import pytest

from services.privacy.protocols import PROTOCOLS


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_draw_needs_no_more_rows_than_it_says(name: str) -> None:
    settings = PROTOCOLS[name]()  # type: ignore[call-arg]
    protocol = settings.plan(1 if name in ("dp-sgd", "finetuned") else 4)
    if protocol.rows is not None:
        assert max(len(protocol.draw()) for _ in range(20)) <= protocol.rows
