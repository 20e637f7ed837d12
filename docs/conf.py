"""The documentation as a site: `make docs`. Each page must be in a table of contents of index.md."""

project = "Attune"
html_title = "Attune"
author = "The Attune maintainers"
extensions = ["myst_parser"]
exclude_patterns = ["measurements"]
myst_heading_anchors = 3  # links such as deploying.md#upgrades
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
# tests/docs names a page that is in no table of contents. The site is built nevertheless.
# Pygments cannot read each program of TypeScript with JSX; it is shown without colours where it does not.
suppress_warnings = ["toc.not_included", "misc.highlighting_failure"]
