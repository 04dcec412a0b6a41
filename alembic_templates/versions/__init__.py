"""The revisions: thin, for what they do is in ``steps/``, which the directives run as well."""
