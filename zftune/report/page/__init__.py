"""The page's style sheet and script."""
