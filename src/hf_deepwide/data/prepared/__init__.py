"""The corpora of the papers, prepared as the papers' recipes read them.

`corpus.py` says what a corpus is, and `catalogue.py` has a row for each. `origins.py` names the places of the splits,
`published.py` their counts and digests, and `cleaning.py` the steps of cleaning. `sources.py` reads the Hub and files,
`writing.py` writes, `manifest.py` remembers what was made, and `prepare.py` puts all of it together.
"""
