"""``python -m sqlalchemy_locks``: the command line, as ``sqlalchemy-locks`` is."""

from sqlalchemy_locks.cli import main

if __name__ == "__main__":
    main()
