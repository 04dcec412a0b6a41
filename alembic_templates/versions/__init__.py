"""The revisions. They only call the steps in ``steps/``, which the directives run as well."""
