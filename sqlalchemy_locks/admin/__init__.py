"""The tables as a ``MetaData``, and queries over everything that is held, waiting or due."""
