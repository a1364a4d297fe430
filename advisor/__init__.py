"""From facts to a verdict: breakdown, attribution, links, regimes, report and command line."""
