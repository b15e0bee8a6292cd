"""Explains what happened: the life of every block, why each lookup ended where it did, and what was wrong.

`story` reads a history, whoever wrote it, and knows nothing of how it is shown. `verdict` finds the moment, the tables and
the sentence that matter; `text`, `page` and `document` show them.
"""
