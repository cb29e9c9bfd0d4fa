"""Turn table configs into an EmbeddingBagCollection."""
