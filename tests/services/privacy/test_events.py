"""Claim: an event is plain data that survives storage, and its cost can be computed from the stored form."""

import json
import math
from typing import Any

import pytest

from privmix.privacy.events import Event, from_json
from privmix.privacy.protocols.ensemble import EnsembleEvent
from privmix.privacy.protocols.exponential import FixedSizeExponentialEvent
from privmix.privacy.protocols.finetuned import FinetunedEvent
from privmix.privacy.protocols.gnmax import GNMaxEvent
from privmix.privacy.protocols.pmixed import PublishedEvent, RatioEvent
from privmix.privacy.protocols.public import PublicEvent
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateEvent

EVENTS = [RatioEvent(80, 0.03, 1.6), RatioEvent(1, 1.0, 1 / 3), PublishedEvent(8, 0.25, 3, 0.0031)]


@pytest.mark.parametrize(
    ("event", "stored", "status"),
    [
        (EVENTS[0], '{"kind":"pmixed-ratio","parts":80,"q":0.03,"radius":1.6}', "certified"),
        (EVENTS[2], '{"kind":"pmixed-renyi","loss":0.0031,"order":3,"parts":8,"q":0.25}', "as published"),
        (
            FixedSizeExponentialEvent(80, 4, 1.6),
            '{"kind":"exponential-fixed-size","parts":80,"radius":1.6,"sample":4}',
            "certified",
        ),
        (GNMaxEvent(80, 20.5), '{"kind":"gnmax","parts":80,"sigma":20.5}', "certified"),
        (SubsampleAggregateEvent(80, 20.5), '{"kind":"subsample-aggregate","parts":80,"scale":20.5}', "certified"),
        (PublicEvent(), '{"kind":"public"}', "certified"),
        (EnsembleEvent(), '{"kind":"ensemble"}', "none"),
        (FinetunedEvent(), '{"kind":"finetuned"}', "none"),
    ],
)
def test_the_stored_form_is_stable(event: Event, stored: str, status: str) -> None:
    """Ledgers contain this text permanently."""
    assert event.to_json() == stored
    assert from_json(stored) == event
    assert event.guarantee.status == status


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", '{"parts": 3}', '{"kind": "magic"}', '{"kind": ["a"]}'])
def test_text_that_is_not_an_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="event"):
        from_json(text)


@pytest.mark.parametrize(
    "change", [{"parts": 0}, {"q": 0.0}, {"q": 1.1}, {"radius": 0.0}, {"radius": math.inf}, {"more": 1}, {"q": None}]
)
def test_fields_out_of_range_are_refused(change: dict[str, Any]) -> None:
    fields = {**EVENTS[0].as_dict(), **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        from_json(json.dumps(fields))


def test_a_kind_belongs_to_one_class() -> None:
    with pytest.raises(TypeError, match="pmixed-ratio"):
        type("Impostor", (RatioEvent,), {"kind": "pmixed-ratio"})


def test_guarantees_state_their_scope() -> None:
    certified = EVENTS[0].guarantee
    sentence = certified.sentence("7.376", 1e-5, 1024)
    for piece in ("1024 released tokens", "(7.376, 1e-05)", "certified", certified.protects, *certified.assumes):
        assert piece in sentence
    assert PublicEvent().guarantee.sentence("8", 1e-5, None).endswith("certified (nothing private is read).")
    assert PublicEvent().guarantee.stopped_by_losses("8", 1e-5).endswith(f"for {certified.protects}.")
