"""Repeats the tables and figures of the papers: what was printed is data, one file a paper; what we get is computed."""
