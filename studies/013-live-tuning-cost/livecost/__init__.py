"""Parts of study 013."""
