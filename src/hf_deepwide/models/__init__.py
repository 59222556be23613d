"""The model families, in a flat folder: its files, and only these, travel to the Hub as remote code."""
