"""Turns the results of attacks into bounds, verdicts, ROC curves and a report."""
