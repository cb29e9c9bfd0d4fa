"""Accept tokens that an identity provider signs: `serve server.jwks=URL` (docs/do/serving.md)."""

FUNCTIONS = {"signed_tokens": "pipeline.extras.jwks.signed_tokens:SignedTokens"}
