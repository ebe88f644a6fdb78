"""Parts of study 004."""
