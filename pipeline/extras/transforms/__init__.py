"""Make columns of other columns while data is prepared and while raw rows are served: `data.transforms`. A file holds a kind."""

COMPONENTS = {"transform": "pipeline.extras.transforms"}
