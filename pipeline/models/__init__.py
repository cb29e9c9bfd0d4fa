"""Turn a model config and tables into an nn.Module on the meta device."""
