"""The model families. This folder is flat on purpose: its files, and only these, travel to the Hub as remote code."""
