"""How the tables came to be, a module for each revision; Alembic runs them."""
