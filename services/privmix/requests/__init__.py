"""Owns a request from its body to its answer, for gateways.

Start at `preparation.py`, which checks a body (`schema.py`) and turns it into generations, and at `admission.py`,
which admits them and streams their answer. `coordinator_client.py` submits generations and continues them when a
coordinator dies; `answers.py` collects the answer; `errors.py` has every HTTP error.
"""
