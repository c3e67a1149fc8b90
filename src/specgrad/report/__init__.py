"""Documents for people: the demo's report."""
