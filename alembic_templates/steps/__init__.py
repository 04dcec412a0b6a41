"""What each step installs and removes. A released step is never edited: a change is a new step.

To add one: ``steps/vNNNN.py`` beside the others, ``versions/NNNN_name.py`` that runs it, its number in
``sqlalchemy_locks.alembic.steps.STEPS``, and its SQL in ``sql/MANIFEST``.
"""
