"""Where the hub's books are: SQLite or PostgreSQL, by the same statements."""
