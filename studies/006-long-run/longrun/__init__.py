"""Parts of study 006."""
