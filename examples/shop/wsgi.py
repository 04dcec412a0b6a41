"""The app for ``flask run`` and ``gunicorn wsgi:app``."""

from shop import create_app

app = create_app()
