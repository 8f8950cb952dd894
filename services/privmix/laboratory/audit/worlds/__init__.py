"""The targets of attacks: hand-built ensembles with exact distributions, and ensembles trained on planted text."""
