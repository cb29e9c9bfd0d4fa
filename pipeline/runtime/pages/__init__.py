"""HTML pages that open from disk: one file each, inline SVG and CSS, no script, and nothing loaded from elsewhere."""
