"""Build HTML pages that open from disk: one file each, with inline SVG and CSS, no script and no
external resources.
"""
