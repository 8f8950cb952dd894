"""Defines the limits of a coordinator's steps, with their defaults. Imports nothing, so that the command line can."""

from dataclasses import dataclass

LEASE_TOKENS = 32
"""The tokens that a coordinator reserves at a time. A coordinator that is killed can lose two leases."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Limits what a coordinator does in a step and how long it waits. The section `coordinator` has the same keys.

    Attributes:
        max_live: the maximum number of sequences in a step. While several keys ask, one gets 3/4 at most.
        max_waiting: the maximum number of further sequences in the queue.
        step_timeout_s: a shard that does not answer within this time counts as stalled.
        recovery_s: how long a sequence waits for a shard, the budget or its database to recover before it fails.
        patience_s: how long a copy of a shard may take before the next copy is called too.
        pace_s: the minimum duration of a step.
    """

    max_live: int = 64
    max_waiting: int = 256
    step_timeout_s: float = 60.0
    recovery_s: float = 90.0
    patience_s: float = 5.0
    pace_s: float = 0.0
