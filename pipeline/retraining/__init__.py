"""Turn windows of new data into versions of a model, gated against the champion."""
