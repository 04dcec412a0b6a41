"""What a server runs: ``flask run`` finds it here, and so does ``gunicorn wsgi:app``."""

from shop import create_app

app = create_app()
