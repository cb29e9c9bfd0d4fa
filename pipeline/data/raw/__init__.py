"""Read raw rows: formats, layouts, text cells."""
