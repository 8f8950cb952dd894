"""Owns training: from a corpus with users to the directory of an ensemble, or of one model that DP-SGD trained.

Start at `train.py`, and at `dp_sgd.py` for DP-SGD. `corpus.py` reads documents, `partition.py` assigns users to
parts, `packing.py` makes blocks of tokens, `adapter.py` trains one part and `per_unit.py` clips each user's gradient.
`manifest.py` describes the result, by which serving verifies it. `expectation.py` says before any training what to
expect.
"""
