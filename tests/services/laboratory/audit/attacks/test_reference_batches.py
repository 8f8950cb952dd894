"""Claim: the audit finds batches of references that one user's texts rearrange."""

import pytest
import torch

from privmix.laboratory.audit.attacks import pipeline, reference_batches
from privmix.laboratory.audit.report.finding import broken
from privmix.laboratory.utility.labelled import Labelled
from privmix.laboratory.utility.reference_texts import ReferenceBatch


def test_a_user_changes_one_reference() -> None:
    assert reference_batches.batch_faults() == ()


def test_batches_of_a_permutation_of_all_documents_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def permuted(real: Labelled, references: int, seed: int) -> list[ReferenceBatch]:
        order = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed)).tolist()
        first = dict(reversed([(real.users[index], index) for index in order]))
        return [
            ReferenceBatch(label, tuple(texts[start : start + references]), references)
            for label in sorted(real.classes)
            for texts in [
                [real.texts[index] for index in order if index in first.values() and real.labels[index] == label]
            ]
            for start in range(0, len(texts) - references + 1, references)
        ]

    monkeypatch.setattr(reference_batches, "batches", permuted)
    faults = reference_batches.batch_faults()
    assert "where a pair of texts replaces a user's text, 12 of 12 batches change" in faults
    assert not [fault for fault in faults if fault.startswith("where another")], "the number of documents stays"
    (found,) = broken([pipeline.finding("privmix evaluate reference", faults, reference_batches.ATTACK)])
    assert "refuted by the comparison of batches" in found.sentence
