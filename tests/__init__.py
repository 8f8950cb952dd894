"""Divides the processors among the processes of a test run.

Two teams of two threads on two processors wait for each other at every operation, awake. The variable is read when
torch is imported, which is after this package.
"""

import os

from privmix.foundation.cpus import available_cpus

if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cpus() // processes)))
