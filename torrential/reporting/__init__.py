"""The report: one page that is made from records only."""
