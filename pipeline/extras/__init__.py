"""Parts that the core never imports: they use its public functions, and it trains without them."""
