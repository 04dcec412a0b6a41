"""A small backup service, which shows sqlalchemy-locks in FastAPI."""
