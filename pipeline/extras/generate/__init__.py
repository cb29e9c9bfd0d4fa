"""Generate data sets other than the quickstart's, whose best possible AUC is known.

`python -m pipeline generate data=histories` (or user_item, conversions, tags) writes one.
"""

COMPONENTS = {"generator": "pipeline.extras.generate.kinds"}
