"""What alembic runs to reach the database: the connection that `upgrade.py` hands over, in its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], target_metadata=None, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
