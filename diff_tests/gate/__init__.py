"""The regression gate: what changed from a base to a head, on the corpus and on seeded cases.

`cases` says what runs, `weighing` what one case means, `running` does it, `report` and `formats` say it.
"""
