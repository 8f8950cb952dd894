"""From what attacks found to verdicts, bounds, curves and one page."""
