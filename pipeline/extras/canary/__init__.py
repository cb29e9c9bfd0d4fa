"""Serve a challenger to a share of the requests, compare it with the champion, and promote it or stop it (docs/do/canary.md)."""

COMPONENTS = {"router": "pipeline.extras.canary.router"}
FUNCTIONS = {
    "canary_card": "pipeline.extras.canary.commands:canary_card",
    "canary_note": "pipeline.extras.canary.commands:canary_note",
    "offer_canary": "pipeline.extras.canary.commands:offer_canary",
}
