"""The tables, version by version; alembic brings older ones up to date and back."""
