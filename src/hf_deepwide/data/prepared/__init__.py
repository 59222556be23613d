"""The corpora of the papers, prepared as the papers' recipes read them.

`catalogue.py` has a row for each corpus, `cleaning.py` the steps of cleaning, `sources.py` reads the Hub and
files, `writing.py` writes, `manifest.py` remembers what was made, and `prepare.py` puts all of it together.
"""
